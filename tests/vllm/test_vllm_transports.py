"""Real vLLM over each transport: the tokens of KVPP off, and a log that names the transport."""

import pytest

from tests.support.vllm_cpu import EngineResult, EngineSpec, run_engine

TOKENS = 12
SETTINGS = {
    "chosen": ({}, "through shared memory (transport: auto)"),
    "shared memory, verified": (
        {"transport": "shared_memory", "verify_transfers": True, "ownership": "bytes"},
        "through shared memory (transport: shared_memory)",
    ),
    "four process groups": (
        {"transport": "process_group", "process_groups": 4},
        "over 4 process group(s) of gloo (transport: process_group)",
    ),
}

BY_DEFAULT = "four process groups"
"""The one of these in every run: what is chosen without settings, `test_vllm_tokens.py` runs too, with its control."""


def finished(checkpoint, prompts, additional_config) -> EngineResult:
    result = run_engine(
        EngineSpec(
            model=checkpoint,
            rounds=[prompts],
            max_tokens=TOKENS,
            engine={"additional_config": additional_config},
        ),
        timeout_s=280,
    )
    assert result.error is None, f"{result.error}\n{result.log[-6000:]}"
    return result


@pytest.fixture(scope="module")
def off(checkpoint, prompts) -> EngineResult:
    return finished(checkpoint, prompts, {})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        pytest.param(*case, id=name, marks=() if name == BY_DEFAULT else pytest.mark.matrix)
        for name, case in SETTINGS.items()
    ],
)
def test_every_transport_gives_the_tokens_of_kvpp_off(checkpoint, prompts, off, settings, line):
    on = finished(checkpoint, prompts, {"enable_kvpp": True, "kvpp": settings})
    assert on.tokens == off.tokens
    assert on.num_blocks > off.num_blocks
    assert on.log.count(f"KVPP sends {line}") == 2


@pytest.mark.matrix
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_without_broadcasts_every_request_differs(checkpoint, prompts, off, transport):
    """The control: what the transports carry is what makes the tokens right."""
    settings = {"skip_broadcasts": True, "transport": transport}
    control = finished(checkpoint, prompts, {"enable_kvpp": True, "kvpp": settings})
    pairs = zip(control.tokens[0], off.tokens[0], strict=True)
    assert all(left != right for left, right in pairs)

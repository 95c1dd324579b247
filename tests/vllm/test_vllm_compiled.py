"""Compiled models: the hooks are operators between the pieces, so KVPP on gives the tokens of KVPP off.

A CPU has no CUDA graphs. What it can show is that the hooks run on every call of a compiled model: as vLLM compiles
for CPUs (Dynamo, backend eager), and split into pieces as for GPUs (VLLM_COMPILE, restored in test support).
"""

from typing import Any

import pytest

from tests.support.vllm_cpu import EngineResult, EngineSpec
from tests.vllm.conftest import LAYERS
from tests.vllm.test_vllm_tokens import CONTROL, ON, finished

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

OFF: dict[str, object] = {}
DYNAMO: dict[str, Any] = {"environment": {"VLLM_CPU_CI_ENV": "1"}, "compilation": {}, "restore": ()}
PIECES: dict[str, Any] = {
    "environment": {},
    "compilation": {"mode": 3, "backend": "eager"},
    "restore": ("compilation",),
}


def compiled(
    checkpoint: str, prompts: list[list[int]], how: dict[str, Any], additional: dict[str, Any]
) -> EngineResult:
    return finished(
        EngineSpec(
            model=checkpoint,
            rounds=[prompts],
            max_tokens=8,
            environment={"TORCH_COMPILE_DISABLE": "0"} | how["environment"],
            engine={
                "enforce_eager": False,
                "compilation_config": how["compilation"],
                "additional_config": additional,
            },
            restore=how["restore"],
            rpc=["kvpp_stats"] if additional else [],
        )
    )


@pytest.fixture(scope="module", params=[DYNAMO, PIECES], ids=["dynamo", "pieces"])
def how(request) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module")
def off(checkpoint, prompts, how):
    return compiled(checkpoint, prompts, how, OFF)


@pytest.fixture(scope="module")
def on(checkpoint, prompts, how):
    return compiled(checkpoint, prompts, how, ON)


@pytest.fixture(scope="module")
def control(checkpoint, prompts, how):
    return compiled(checkpoint, prompts, how, CONTROL)


def test_a_compiled_model_gives_the_same_tokens(off, on):
    assert on.tokens == off.tokens


def test_a_compiled_model_without_broadcasts_differs(off, control):
    pairs = zip(control.tokens[0], off.tokens[0], strict=True)
    assert all(left != right for left, right in pairs)


def test_every_layer_of_every_forward_was_broadcast(on):
    for rank in on.rpc["kvpp_stats"]:
        assert rank["forwards_with_history"] > 0
        assert rank["broadcasts"] == LAYERS * rank["forwards_with_history"]

"""Compiled models: the hooks are operators between the pieces, so KVPP on gives the tokens of KVPP off.

A CPU has no CUDA graphs. What it can show is that the hooks run on every call of a compiled model: as vLLM compiles
for CPUs (Dynamo, backend eager), and split into pieces as for GPUs (VLLM_COMPILE, restored in test support).
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.vllm_cpu import EngineResult, EngineSpec
from tests.vllm.conftest import LAYERS
from tests.vllm.test_vllm_tokens import CONTROL, ON, finished

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

OFF: dict[str, object] = {}


@dataclass(frozen=True, kw_only=True)
class How:
    """A way to compile. `logged` is what vLLM logs on each worker when it does."""

    logged: str
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    restore: tuple[str, ...] = ()


DYNAMO = How(environment={"VLLM_CPU_CI_ENV": "1"}, logged="Detected eager backend")
PIECES = How(
    # Level 0 leaves out fusion passes, which vLLM has for GPUs alone.
    engine={
        "optimization_level": 0,
        "compilation_config": {"mode": 3, "backend": "eager", "compile_sizes": []},
    },
    restore=("compilation",),
    logged="Compiling a graph for compile range",
)


def compiled(
    checkpoint: str, prompts: list[list[int]], how: How, additional: dict[str, Any]
) -> EngineResult:
    return finished(
        EngineSpec(
            model=checkpoint,
            rounds=[prompts],
            max_tokens=8,
            # The demo's settings switch compilation off.
            environment={"TORCH_COMPILE_DISABLE": "0"} | how.environment,
            engine={"enforce_eager": False, "additional_config": additional} | how.engine,
            restore=how.restore,
            rpc=["kvpp_stats"] if additional else [],
        )
    )


@pytest.fixture(scope="module", params=[DYNAMO, PIECES], ids=["dynamo", "pieces"])
def how(request) -> How:
    found: How = request.param
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


def test_the_model_was_compiled(how, off, on):
    assert how.logged in off.log
    assert how.logged in on.log


def test_a_compiled_model_gives_the_same_tokens(off, on):
    assert on.tokens == off.tokens


def test_a_compiled_model_without_broadcasts_differs(off, control):
    pairs = zip(control.tokens[0], off.tokens[0], strict=True)
    assert all(left != right for left, right in pairs)


def test_every_layer_of_every_forward_was_broadcast(on):
    for rank in on.rpc["kvpp_stats"]:
        assert rank["forwards_with_history"] > 0
        assert rank["broadcasts"] == LAYERS * rank["forwards_with_history"]

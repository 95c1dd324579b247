"""Sparse MLA, compiled: the indexer's hook lies in its operator, and KVPP on gives the logprobs of KVPP off.

As in `test_vllm_compiled.py` no graph is captured here. What a CPU can show is that every bundle is waited for inside
an operator at which compiled pieces end, before anything uses it, at every call of a compiled model. Kernels, models
and phases are those of `test_vllm_sparse.py`.
"""

from dataclasses import replace

import pytest

from tests.support.sparse_models import environment, write_sparse_checkpoint
from tests.support.triton_cpu import model_runner_v2
from tests.support.vllm_cpu import EngineSpec, run_engine
from tests.vllm.test_vllm_compiled import DYNAMO, PIECES, How
from tests.vllm.test_vllm_sparse import CHUNKED, INDEX_TOPK, LAYERS, OFF, ON, RIGHT, Pair, rounds

pytestmark = pytest.mark.timeout(2400)

PHASES = (*RIGHT, "phase_nothing_sent", "phase_acquired_late")
INDEXERS = {"deepseek": LAYERS, "glm": 6}
# vLLM's default for these models is breakable graphs, with which it compiles nothing.
COMPILED = {"TORCH_COMPILE_DISABLE": "0", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}


def compiled(directory, family: str, how: How, runner: int) -> Pair:
    model = write_sparse_checkpoint(
        directory / family, family=family, layers=LAYERS, index_topk=INDEX_TOPK
    )
    (directory / "plugins").mkdir()
    variables = COMPILED | how.environment | environment(directory / "plugins")
    if runner == 2:
        (directory / "triton").mkdir()
        second = model_runner_v2(directory / "triton")
        paths = f"{variables['PYTHONPATH']}:{second['PYTHONPATH']}"
        variables |= second | {"PYTHONPATH": paths}
    off = EngineSpec(
        model=str(model),
        rounds=rounds(PHASES),
        max_tokens=6,
        logprobs=True,
        engine=CHUNKED | {"enforce_eager": False, "additional_config": OFF} | how.engine,
        environment=variables,
        restore=("chunked_prefill", "prefix_caching", *how.restore),
        before=[["phase_right"] if phase else [] for phase in PHASES],
    )
    on = replace(
        off,
        engine=off.engine | {"additional_config": ON},
        before=[[phase] if phase else [] for phase in PHASES],
        rpc=["kvpp_stats"],
    )
    results = [run_engine(spec, timeout_s=900) for spec in (off, on)]
    for result in results:
        assert result.error is None, f"{result.error}\n{result.log[-6000:]}"
        assert how.logged in result.log
        assert ("Using V2 Model Runner" in result.log) == (runner == 2)
    return Pair(off=results[0], on=results[1], phases=PHASES)


CASES = {
    "deepseek-pieces": ("deepseek", PIECES, 1),
    "glm-pieces": ("glm", PIECES, 1),
    "deepseek-dynamo": ("deepseek", DYNAMO, 1),
    "glm-dynamo": ("glm", DYNAMO, 1),
    "deepseek-pieces-v2": ("deepseek", PIECES, 2),
    "glm-pieces-v2": ("glm", PIECES, 2),
    "deepseek-dynamo-v2": ("deepseek", DYNAMO, 2),
    "glm-dynamo-v2": ("glm", DYNAMO, 2),
}
FIRST = "glm-pieces"
"""Runs in `make test`: layers with an indexer and without, split as for GPUs."""


@pytest.mark.parametrize(
    "case", [name if name == FIRST else pytest.param(name, marks=pytest.mark.matrix) for name in CASES]
)
def test_a_compiled_sparse_model_gives_the_same_logprobs(case, tmp_path):
    family, how, runner = CASES[case]
    pair = compiled(tmp_path, family, how, runner)
    assert pair.equal("phase_right")
    assert pair.equal("")
    assert sum(pair.on.cached_tokens[1]) > 0
    # Controls: nothing sent; and a wait that comes where the main cache is updated, as if there were no operator.
    assert all(pair.long_ones_differ("phase_nothing_sent"))
    assert all(pair.long_ones_differ("phase_acquired_late"))
    main, indexer = 16 * 576 * 4, 16 * 132
    for rank in pair.on.rpc["kvpp_stats"]:
        per_forward = (LAYERS * main + INDEXERS[family] * indexer) * rank["blocks"]
        assert rank["bytes_broadcast"] == per_forward * rank["forwards_with_history"] > 0

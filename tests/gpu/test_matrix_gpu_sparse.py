"""vLLM's GPU worker with sparse MLA, streams delayed at random: DeepSeek-V3.2 and GLM-DSA, whose layers share indexes.

The kernels are torch's (`gpu_platform.sparse`), each one launch on the stream that computes.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.gpu.rounds import (
    Runs,
    run_rounds,
    test_every_request_differs_when_broadcasts_are_skipped,
    test_every_request_differs_when_compute_does_not_wait,
    test_the_worker_and_the_runner_are_the_gpu_s,
    test_tokens_are_those_without_kvpp,
)
from tests.support.workload import Workload
from tests.vllm.test_matrix_sparse import (
    BLOCK,
    DRAFTS,
    GLM_INDEXERS,
    INDEX_TOPK,
    INDEXER,
    LAYERS,
    MAIN,
    MTP,
    PACKED,
    make_checkpoint,
)

__all__ = [
    "test_every_request_differs_when_broadcasts_are_skipped",
    "test_every_request_differs_when_compute_does_not_wait",
    "test_the_worker_and_the_runner_are_the_gpu_s",
    "test_tokens_are_those_without_kvpp",
]

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

TOKENS = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """main: bytes a token of the main cache. indexers: layers with an indexer. drafts: draft caches of every rank."""

    workload: Workload
    main: int = MAIN
    indexers: frozenset[int] = frozenset(range(LAYERS))
    drafts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SparseRuns(Runs):
    """What the case says of its caches."""

    case: Case


def deepseek(models: Path, runner: int) -> Case:
    return Case(workload=_workload(make_checkpoint(models, "deepseek"), runner))


def deepseek_packed(models: Path, runner: int) -> Case:
    """Main caches as `fp8_ds_mla`."""
    workload = _workload(make_checkpoint(models, "deepseek"), runner, kv_cache_dtype="fp8_ds_mla")
    return Case(workload=workload, main=PACKED)


def deepseek_mtp(models: Path, runner: int) -> Case:
    """One draft layer, which has an indexer of its own."""
    model = make_checkpoint(models, "deepseek", draft_layer=True)
    return Case(workload=_workload(model, runner, speculative_config=MTP), drafts=DRAFTS)


def glm(models: Path, runner: int) -> Case:
    """Some layers use the choice that the layer before them made."""
    return Case(workload=_workload(make_checkpoint(models, "glm"), runner), indexers=GLM_INDEXERS)


def glm_packed(models: Path, runner: int) -> Case:
    """Shared choices, and main caches as `fp8_ds_mla`."""
    workload = _workload(make_checkpoint(models, "glm"), runner, kv_cache_dtype="fp8_ds_mla")
    return Case(workload=workload, main=PACKED, indexers=GLM_INDEXERS)


def _workload(model: str, runner: int, **engine: object) -> Workload:
    return Workload(
        model=model,
        rounds=[],
        runner=runner,
        sparse=True,
        engine={"kv_cache_memory_bytes": 48 << 20, "enable_prefix_caching": False} | engine,
    )


CASES = [
    *((make, 1) for make in (deepseek, deepseek_packed, deepseek_mtp, glm, glm_packed)),
    *((make, 2) for make in (deepseek, glm)),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].__name__}-v{case[1]}")
def runs(request, prompts, library, tmp_path_factory) -> SparseRuns:
    make, runner = request.param
    case = make(tmp_path_factory.mktemp("models"), runner)
    workload = replace(case.workload, device=library)
    return SparseRuns(**vars(run_rounds(workload, prompts, tokens=TOKENS)), case=case)


def test_several_requests_are_longer_than_an_index(prompts):
    assert sum(len(prompt) > INDEX_TOPK + BLOCK for prompt in prompts) >= 2


def test_drafts_are_those_without_kvpp(runs):
    drafts = runs.off.drafts
    assert runs.on.drafts[: 2 * len(drafts)] == drafts * 2
    assert bool(drafts) == bool(runs.case.drafts)


def test_each_rank_holds_bundles_of_both_caches(runs):
    case = runs.case
    for rank in runs.on.rpc["kvpp_stats"]:
        layers = [int(re.findall(r"\d+", name)[0]) for name in rank["layers_owned"]]
        assert len(layers) == LAYERS // 2
        assert sorted(rank["draft_layers"]) == sorted(case.drafts)
        owned = sum(BLOCK * (case.main + INDEXER * (layer in case.indexers)) for layer in layers)
        slots = 2 + bool(case.drafts)
        held = rank["blocks"] * (owned + slots * BLOCK * (case.main + INDEXER))
        # Beside them, two staging halves of an eighth of the blocks at most.
        assert held <= rank["kv_bytes"] <= held * 1.2
        assert rank["forwards_with_history"] == runs.on.covered.with_history > 0

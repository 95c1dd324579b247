"""Sparse MLA combined with draft layers, the whole scheduler and pipeline stages: KVPP on gives KVPP off's tokens.

Models and kernels are those of `test_vllm_sparse.py`, as is the zeroing of new blocks.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.sparse_models import write_sparse_checkpoint
from tests.support.workload import (
    Outcome,
    Workload,
    kvpp,
    random_requests,
    run_workloads,
    together,
)

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

LAYERS = 10
INDEX_TOPK = 64
BLOCK = 16
MAIN, PACKED, INDEXER = 576 * 4, 656, 132
"""Bytes a token: the main cache in float32 or as `fp8_ds_mla`, and the indexer's."""

GLM_INDEXERS = frozenset({0, 1, 3, 5, 7, 9, 11})
DRAFTS = tuple(f"model.layers.{LAYERS}.self_attn.{name}" for name in ("attn", "indexer.k_cache"))

MTP = {"method": "mtp", "num_speculative_tokens": 1}
SCHEDULING = {
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 64,
    "async_scheduling": True,
    # The same few blocks with KVPP on and off: requests are preempted, and all runs compute the same batches.
    "num_gpu_blocks_override": 24,
    "max_model_len": 256,
}
RESTORE = ("chunked_prefill", "prefix_caching", "async_scheduling")
MET = ("chunks", "mixed", "prefix_hits", "preemptions", "resumed", "aborted", "aborted_in_flight")


@dataclass(frozen=True, kw_only=True)
class Case:
    """owned[stage]: how many layers each rank of the stage must own. main: bytes a token of the main cache.
    indexers: layers with an indexer. drafts: draft caches of every rank, as layers of vLLM.
    met: what of `Covered` must have happened. in_flight: the most batches at once.
    forgetful: run once more with a draft layer that forgets its caches.
    """

    workload: Workload
    owned: list[list[int]]
    main: int = MAIN
    indexers: frozenset[int] = frozenset(range(LAYERS))
    drafts: tuple[str, ...] = ()
    met: tuple[str, ...] = ()
    in_flight: int = 1
    forgetful: bool = False

    def bundle(self, layer: int) -> int:
        """Bytes a block."""
        return BLOCK * (self.main + INDEXER * (layer in self.indexers))


@dataclass(frozen=True, kw_only=True)
class Runs:
    """forgetful: KVPP on, with a draft layer that forgets its caches; for cases that ask for it."""

    off: Outcome
    on: Outcome
    control: Outcome
    forgetful: Outcome | None
    case: Case


def mtp(models: Path, prompts: list[list[int]]) -> Case:
    """DeepSeek-V3.2 with one draft layer, which has an indexer of its own."""
    engine = {"speculative_config": MTP, "kv_cache_memory_bytes": 48 << 20}
    return Case(
        workload=Workload(
            model=make_checkpoint(models, "deepseek", draft_layer=True),
            rounds=[together(prompts, max_tokens=24)],
            sparse=True,
            engine=engine,
        ),
        owned=[[5, 5]],
        drafts=DRAFTS,
        forgetful=True,
    )


def scheduling(models: Path, prompts: list[list[int]]) -> Case:
    """DeepSeek-V3.2: chunked prefill, prefix caching, preemption, asynchronous scheduling and aborts together."""
    return Case(
        workload=Workload(
            model=make_checkpoint(models, "deepseek"),
            rounds=[random_requests(24, seed=1, longest=200)],
            sparse=True,
            engine=SCHEDULING,
            restore=RESTORE,
        ),
        owned=[[5, 5]],
        met=MET,
        in_flight=2,
    )


def mtp_scheduling(models: Path, prompts: list[list[int]]) -> Case:
    """Both of these together."""
    return Case(
        workload=Workload(
            model=make_checkpoint(models, "deepseek", draft_layer=True),
            rounds=[random_requests(24, seed=1, longest=200)],
            sparse=True,
            engine=SCHEDULING | {"speculative_config": MTP, "num_gpu_blocks_override": 18},
            restore=RESTORE,
        ),
        owned=[[5, 5]],
        drafts=DRAFTS,
        met=MET,
        in_flight=2,
    )


def glm_stages(models: Path, prompts: list[list[int]]) -> Case:
    """GLM-DSA in two stages, the second of which starts with a layer that has an indexer; packed main caches.

    A stage that starts with a layer without one would use a choice that no layer of it has made: vLLM hands none on.
    """
    engine = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "kv_cache_dtype": "fp8_ds_mla",
        "kv_cache_memory_bytes": 32 << 20,
    }
    return Case(
        workload=Workload(
            model=make_checkpoint(models, "glm", layers=12),
            rounds=[together(prompts, max_tokens=16)],
            workers=4,
            sparse=True,
            engine=engine,
            environment={"VLLM_PP_LAYER_PARTITION": "7,5"},
        ),
        owned=[[4, 3], [3, 2]],
        main=PACKED,
        indexers=GLM_INDEXERS,
        in_flight=2,
    )


def glm_second_runner(models: Path, prompts: list[list[int]]) -> Case:
    """GLM-DSA on Model Runner V2."""
    return Case(
        workload=Workload(
            model=make_checkpoint(models, "glm"),
            rounds=[together(prompts, max_tokens=16)],
            runner=2,
            sparse=True,
            engine={"kv_cache_memory_bytes": 48 << 20},
        ),
        owned=[[5, 5]],
        indexers=GLM_INDEXERS,
    )


def make_checkpoint(
    models: Path, family: str, *, layers: int = LAYERS, draft_layer: bool = False
) -> str:
    written = write_sparse_checkpoint(
        models / family, family=family, layers=layers, index_topk=INDEX_TOPK, draft_layer=draft_layer
    )
    return str(written)


@pytest.fixture(
    scope="module",
    params=[mtp, scheduling, mtp_scheduling, glm_stages, glm_second_runner],
    ids=lambda make: make.__name__,
)
def runs(request, prompts, tmp_path_factory) -> Runs:
    case = request.param(tmp_path_factory.mktemp("models"), prompts)
    variants = [
        kvpp(case.workload, None),
        kvpp(case.workload, {}),
        kvpp(case.workload, {"skip_broadcasts": True}),
    ]
    if case.forgetful:
        variants.append(kvpp(case.workload, {}, before="tests.support.draft_layers:forget"))
    off, on, control, *forgetful = run_workloads(variants)
    return Runs(
        off=off, on=on, control=control, forgetful=forgetful[0] if forgetful else None, case=case
    )


def test_tokens_are_those_without_kvpp(runs):
    assert runs.on.tokens == runs.off.tokens
    assert runs.on.covered == runs.off.covered


def test_tokens_differ_when_broadcasts_are_skipped(runs):
    pairs = zip(runs.control.tokens, runs.off.tokens, strict=True)
    long = [(left, right) for left, right in pairs if len(right) > 4]
    assert len(long) > len(runs.off.tokens) // 2
    assert all(left != right for left, right in long)


def test_several_requests_are_longer_than_an_index(runs):
    requests = [request for batch in runs.case.workload.rounds for request in batch]
    lengths = [len(r.prompt) + len(t) for r, t in zip(requests, runs.on.tokens, strict=True)]
    assert sum(length > INDEX_TOPK + BLOCK for length in lengths) >= 3


def test_the_run_met_what_it_is_for(runs):
    for run in (runs.off, runs.on, runs.control):
        missing = [name for name in runs.case.met if getattr(run.covered, name) == 0]
        assert missing == [], run.covered.text()
        assert run.covered.in_flight == runs.case.in_flight
        assert ("Using V2 Model Runner" in run.log) == (runs.case.workload.runner == 2)


def test_some_drafts_are_right_and_the_same_without_kvpp(runs):
    assert runs.on.drafts == runs.off.drafts
    assert runs.on.accepted == runs.off.accepted
    assert bool(runs.on.drafts) == bool(runs.case.drafts)
    if runs.case.drafts:
        assert 0 < runs.on.accepted < len(runs.on.drafts)
    if runs.case.forgetful:
        assert runs.forgetful.drafts != runs.on.drafts
        assert runs.forgetful.tokens == runs.on.tokens  # a wrong draft costs time, never a token


def test_each_stage_deals_its_own_layers_to_its_own_group(runs):
    stats = runs.on.rpc["kvpp_stats"]
    found = [
        [len(rank["layers_owned"]) for rank in stats if rank["stage"] == stage]
        for stage in range(len(runs.case.owned))
    ]
    assert found == runs.case.owned
    names = [name for rank in stats for name in rank["layers_owned"]]
    assert names == [f"model.layers.{n}.self_attn.attn" for n in range(len(names))]


def test_each_rank_holds_what_it_owns_two_scratch_slots_and_the_draft_layer(runs):
    case = runs.case
    for rank in runs.on.rpc["kvpp_stats"]:
        owned = sum(case.bundle(number(name)) for name in rank["layers_owned"])
        largest = BLOCK * (case.main + INDEXER)
        assert sorted(rank["draft_layers"]) == sorted(case.drafts)
        assert rank["kv_bytes"] == rank["blocks"] * (owned + 2 * largest + bool(case.drafts) * largest)


def test_every_layer_of_the_stage_is_one_broadcast_of_its_bundle(runs):
    covered, stats = runs.on.covered, runs.on.rpc["kvpp_stats"]
    for rank in stats:
        stage = [n for peer in stats if peer["stage"] == rank["stage"] for n in peer["layers_owned"]]
        per_forward = rank["blocks"] * sum(runs.case.bundle(number(name)) for name in stage)
        assert rank["forwards"] == covered.forwards
        assert rank["forwards_with_history"] == covered.with_history > 0
        assert rank["broadcasts"] == covered.with_history * len(stage)
        assert rank["bytes_broadcast"] == covered.with_history * per_forward


def number(layer: str) -> int:
    """A layer's index."""
    return int(re.findall(r"\d+", layer)[0])

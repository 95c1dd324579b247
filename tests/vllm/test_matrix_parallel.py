"""More than two workers: KVPP groups of four, groups of pipeline stages, experts spread over the group."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvpp_vllm.demo.checkpoint import write_checkpoint
from tests.support.checkpoints import write_moe_checkpoint
from tests.support.workload import Outcome, Workload, off_on_control, together

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

PAGE_BYTES = 16 * 576 * 4
TOKENS = 16
# All requests fit at once with KVPP on and off, so both compute the same batches.
MEMORY = {"kv_cache_memory_bytes": 48 << 20}


@dataclass(frozen=True, kw_only=True)
class Runs:
    """owned[stage]: how many layers each rank of the stage must own."""

    off: Outcome
    on: Outcome
    control: Outcome
    owned: list[list[int]]


def tp4(models: Path) -> tuple[Workload, list[list[int]]]:
    model = write_checkpoint(models / "tp4", layers=13)
    return Workload(model=str(model), rounds=[], workers=4, engine=MEMORY), [[4, 3, 3, 3]]


def tp2_pp2(models: Path) -> tuple[Workload, list[list[int]]]:
    model = write_checkpoint(models / "pp", layers=13)
    engine = MEMORY | {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    stages = {"VLLM_PP_LAYER_PARTITION": "7,6"}
    workload = Workload(model=str(model), rounds=[], workers=4, engine=engine, environment=stages)
    return workload, [[4, 3], [3, 3]]


def tp2_ep(models: Path) -> tuple[Workload, list[list[int]]]:
    model = write_moe_checkpoint(models / "moe", layers=8)
    engine = MEMORY | {"enable_expert_parallel": True}
    return Workload(model=str(model), rounds=[], engine=engine), [[4, 4]]


@pytest.fixture(scope="module", params=[tp4, tp2_pp2, tp2_ep], ids=lambda make: make.__name__)
def runs(request, prompts, tmp_path_factory) -> Runs:
    workload, owned = request.param(tmp_path_factory.mktemp("models"))
    rounds = [together(prompts, max_tokens=TOKENS)]
    off, on, control = off_on_control(replace(workload, rounds=rounds))
    return Runs(off=off, on=on, control=control, owned=owned)


def test_tokens_are_those_without_kvpp(runs):
    assert all(len(tokens) == TOKENS for tokens in runs.off.tokens)
    assert runs.on.tokens == runs.off.tokens


def test_every_request_differs_when_broadcasts_are_skipped(runs):
    pairs = zip(runs.control.tokens, runs.off.tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_the_same_memory_holds_more_blocks(runs):
    assert runs.on.num_blocks > runs.off.num_blocks


def test_each_stage_deals_its_own_layers_to_its_own_group(runs):
    stats = runs.on.rpc["kvpp_stats"]
    found = [
        [len(rank["layers_owned"]) for rank in stats if rank["stage"] == stage]
        for stage in range(len(runs.owned))
    ]
    assert found == runs.owned
    names = [name for rank in stats for name in rank["layers_owned"]]
    assert names == [f"model.layers.{n}.self_attn.attn" for n in range(len(names))]


def test_each_rank_holds_what_it_owns_and_two_scratch_slots(runs):
    for rank in runs.on.rpc["kvpp_stats"]:
        layers = len(rank["layers_owned"]) + 2
        assert rank["kv_bytes"] == rank["blocks"] * layers * PAGE_BYTES
        assert rank["draft_layers"] == []


def test_broadcasts_are_those_of_the_stage(runs):
    covered = runs.on.covered
    for rank in runs.on.rpc["kvpp_stats"]:
        assert rank["forwards"] == covered.forwards
        assert rank["forwards_with_history"] == covered.with_history > 0
        assert rank["broadcasts"] == covered.with_history * sum(runs.owned[rank["stage"]])


def test_pipeline_stages_work_on_two_batches_at_once(runs):
    assert runs.on.covered.in_flight == len(runs.owned)


def test_experts_are_spread_over_the_group_where_asked_for(runs, request):
    spread = "tp2_ep" in request.node.name
    for run in (runs.off, runs.on, runs.control):
        assert [f"Worker_TP{rank}_EP{rank} " in run.log for rank in (0, 1)] == [spread, spread]

"""Model Runner V2: the tokens of KVPP on are those of KVPP off, and those of Model Runner V1."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvpp_vllm.demo.checkpoint import write_checkpoint
from tests.support.checkpoints import write_moe_checkpoint, write_mtp_checkpoint
from tests.support.workload import (
    Outcome,
    Workload,
    off_on_control,
    random_requests,
    run_workloads,
    together,
)
from tests.vllm.test_vllm_compiled import PIECES

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

PAGE_BYTES = 16 * 576 * 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """owned[stage]: how many layers each rank of the stage must own. drafts: draft layers of every rank.
    met: what of `Covered` must have happened. in_flight: the most batches at once.
    logged: what workers log in such a run.
    """

    workload: Workload
    owned: list[list[int]]
    drafts: tuple[str, ...] = ()
    met: tuple[str, ...] = ()
    in_flight: int = 1
    logged: str = ""


@dataclass(frozen=True, kw_only=True)
class Runs:
    v1: Outcome
    off: Outcome
    on: Outcome
    control: Outcome
    case: Case


def scheduling(models: Path, prompts: list[list[int]]) -> Case:
    """Chunked prefill, prefix caching, preemption, asynchronous scheduling and aborts together."""
    engine = {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 64,
        "async_scheduling": True,
        # The same few blocks with KVPP on and off: requests are preempted, and all runs compute the same batches.
        "num_gpu_blocks_override": 24,
        "max_model_len": 256,
    }
    return Case(
        workload=Workload(
            model=str(write_checkpoint(models / "mla", layers=8)),
            rounds=[random_requests(24, seed=1, longest=200)],
            engine=engine,
            restore=("chunked_prefill", "prefix_caching", "async_scheduling"),
        ),
        owned=[[4, 4]],
        met=("chunks", "mixed", "prefix_hits", "preemptions", "aborted", "aborted_in_flight"),
        in_flight=2,
    )


def mtp(models: Path, prompts: list[list[int]]) -> Case:
    """One draft layer, two draft tokens a step: its cache is used after `execute_model` has returned."""
    engine = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        "kv_cache_memory_bytes": 32 << 20,
    }
    return Case(
        workload=Workload(
            model=str(write_mtp_checkpoint(models / "mtp", layers=8)),
            rounds=[together(prompts, max_tokens=16)],
            engine=engine,
        ),
        owned=[[4, 4]],
        drafts=("model.layers.8.self_attn.attn",),
    )


def tp2_pp2(models: Path, prompts: list[list[int]]) -> Case:
    """Two pipeline stages of unequal length, each with its own KVPP group."""
    engine = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "kv_cache_memory_bytes": 48 << 20,
    }
    return Case(
        workload=Workload(
            model=str(write_checkpoint(models / "pp", layers=13)),
            rounds=[together(prompts, max_tokens=10)],
            workers=4,
            engine=engine,
            environment={"VLLM_PP_LAYER_PARTITION": "7,6"},
        ),
        owned=[[4, 3], [3, 3]],
        in_flight=2,
    )


def tp4(models: Path, prompts: list[list[int]]) -> Case:
    return Case(
        workload=Workload(
            model=str(write_checkpoint(models / "tp4", layers=13)),
            rounds=[together(prompts, max_tokens=10)],
            workers=4,
            engine={"kv_cache_memory_bytes": 48 << 20},
        ),
        owned=[[4, 3, 3, 3]],
    )


def ep(models: Path, prompts: list[list[int]]) -> Case:
    """Experts spread over the group."""
    return Case(
        workload=Workload(
            model=str(write_moe_checkpoint(models / "moe", layers=8)),
            rounds=[together(prompts, max_tokens=10)],
            engine={"enable_expert_parallel": True, "kv_cache_memory_bytes": 48 << 20},
        ),
        owned=[[4, 4]],
        logged="Worker_TP1_EP1 ",
    )


def compiled(models: Path, prompts: list[list[int]]) -> Case:
    """Compiled by Dynamo, backend eager, as vLLM compiles for CPUs."""
    return Case(
        workload=Workload(
            model=str(write_checkpoint(models / "mla", layers=8)),
            rounds=[together(prompts, max_tokens=10)],
            engine={"enforce_eager": False, "kv_cache_memory_bytes": 48 << 20},
            environment={"TORCH_COMPILE_DISABLE": "0", "VLLM_CPU_CI_ENV": "1"},
        ),
        owned=[[4, 4]],
        logged="Detected eager backend",
    )


def pieces(models: Path, prompts: list[list[int]]) -> Case:
    """Compiled by vLLM and split into pieces as for GPUs, backend eager."""
    return Case(
        workload=Workload(
            model=str(write_checkpoint(models / "mla", layers=8)),
            rounds=[together(prompts, max_tokens=10)],
            engine=PIECES.engine | {"enforce_eager": False, "kv_cache_memory_bytes": 48 << 20},
            environment={"TORCH_COMPILE_DISABLE": "0"} | PIECES.environment,
            restore=PIECES.restore,
        ),
        owned=[[4, 4]],
        logged=PIECES.logged,
    )


@pytest.fixture(
    scope="module",
    params=[scheduling, mtp, tp2_pp2, tp4, ep, compiled, pieces],
    ids=lambda make: make.__name__,
)
def runs(request, prompts, tmp_path_factory) -> Runs:
    case = request.param(tmp_path_factory.mktemp("models"), prompts)
    off, on, control = off_on_control(replace(case.workload, runner=2))
    (v1,) = run_workloads([case.workload])
    return Runs(v1=v1, off=off, on=on, control=control, case=case)


def test_model_runner_v2_ran(runs):
    assert all("Using V2 Model Runner" in run.log for run in (runs.off, runs.on, runs.control))
    assert "Using V2 Model Runner" not in runs.v1.log
    assert all(runs.case.logged in run.log for run in (runs.off, runs.on, runs.control))


def test_tokens_are_those_without_kvpp(runs):
    assert runs.on.tokens == runs.off.tokens


def test_tokens_are_those_of_model_runner_v1(runs):
    finished = [
        n
        for n, request in enumerate(runs.case.workload.rounds[0])
        if request.abort_after is None  # an abort meets the two runners at different tokens
    ]
    assert len(finished) >= 8
    assert [runs.on.tokens[n] for n in finished] == [runs.v1.tokens[n] for n in finished]


def test_tokens_differ_when_broadcasts_are_skipped(runs):
    pairs = zip(runs.control.tokens, runs.off.tokens, strict=True)
    long = [(left, right) for left, right in pairs if len(right) > 4]
    assert len(long) > len(runs.off.tokens) // 2
    assert all(left != right for left, right in long)


def test_the_run_met_what_it_is_for(runs):
    for run in (runs.off, runs.on, runs.control):
        missing = [name for name in runs.case.met if getattr(run.covered, name) == 0]
        assert missing == [], run.covered.text()
        assert run.covered.in_flight == runs.case.in_flight


def test_some_drafts_are_right_and_the_same_without_kvpp(runs):
    assert runs.on.drafts == runs.off.drafts
    assert runs.on.accepted == runs.off.accepted
    assert (runs.on.accepted > 0) == bool(runs.case.drafts)


def test_each_stage_deals_its_own_target_layers_to_its_own_group(runs):
    stats = runs.on.rpc["kvpp_stats"]
    found = [
        [len(rank["layers_owned"]) for rank in stats if rank["stage"] == stage]
        for stage in range(len(runs.case.owned))
    ]
    assert found == runs.case.owned
    names = [name for rank in stats for name in rank["layers_owned"]]
    assert names == [f"model.layers.{n}.self_attn.attn" for n in range(len(names))]


def test_each_rank_holds_what_it_owns_two_scratch_slots_and_the_draft_layers(runs):
    for rank in runs.on.rpc["kvpp_stats"]:
        assert rank["draft_layers"] == list(runs.case.drafts)
        layers = len(rank["layers_owned"]) + 2 + len(runs.case.drafts)
        assert rank["kv_bytes"] == rank["blocks"] * layers * PAGE_BYTES


def test_forwards_are_those_that_were_scheduled_and_send_their_stage(runs):
    covered = runs.on.covered
    for rank in runs.on.rpc["kvpp_stats"]:
        assert rank["forwards"] == covered.forwards
        assert rank["forwards_with_history"] == covered.with_history > 0
        assert rank["broadcasts"] == covered.with_history * sum(runs.case.owned[rank["stage"]])

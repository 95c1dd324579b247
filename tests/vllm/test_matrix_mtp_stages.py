"""A draft layer on the last of two pipeline stages, on Model Runner V2: tokens of KVPP on are those of KVPP off.

Asynchronous, as on GPUs: without it stock vLLM fails here, KVPP off, as it does on Model Runner V1. Tokens are not
compared with those of one stage, which differ with KVPP off as well: stages compute other batches, and vLLM's rotary
embedding for CPUs depends on the batch.
"""

from dataclasses import dataclass, replace

import pytest

from tests.support.checkpoints import write_mtp_checkpoint
from tests.support.workload import Outcome, Workload, off_on_control, run_workloads, together

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

LAYERS = 13
PAGE_BYTES = 16 * 576 * 4
DRAFT = f"model.layers.{LAYERS}.self_attn.attn"


@dataclass(frozen=True, kw_only=True)
class Runs:
    off: Outcome
    on: Outcome
    control: Outcome


@pytest.fixture(scope="module")
def workload(prompts, tmp_path_factory) -> Workload:
    model = write_mtp_checkpoint(tmp_path_factory.mktemp("models") / "mtp", layers=LAYERS)
    return Workload(
        model=str(model),
        rounds=[together(prompts, max_tokens=10)],
        workers=4,
        runner=2,
        engine={
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "async_scheduling": True,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
            "kv_cache_memory_bytes": 48 << 20,
        },
        restore=("async_scheduling",),
        environment={"VLLM_PP_LAYER_PARTITION": "7,6"},
    )


@pytest.fixture(scope="module")
def runs(workload) -> Runs:
    off, on, control = off_on_control(workload)
    return Runs(off=off, on=on, control=control)


def test_it_ran_asynchronously_on_model_runner_v2(runs):
    for run in (runs.off, runs.on, runs.control):
        assert "Using V2 Model Runner" in run.log
        assert run.async_scheduling
        assert run.covered.in_flight == 3


def test_tokens_are_those_without_kvpp(runs):
    assert runs.on.tokens == runs.off.tokens
    assert runs.on.covered == runs.off.covered


def test_tokens_differ_when_broadcasts_are_skipped(runs):
    pairs = zip(runs.control.tokens, runs.off.tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_as_many_drafts_are_right_as_without_kvpp(runs):
    assert 0 < runs.on.accepted < len(runs.on.drafts)
    assert runs.on.accepted == runs.off.accepted


def test_only_the_last_stage_has_the_draft_layer(runs):
    owned = [[4, 3], [3, 3]]
    for rank in runs.on.rpc["kvpp_stats"]:
        stage = owned[rank["stage"]]
        drafts = [DRAFT] if rank["stage"] == 1 else []
        assert rank["draft_layers"] == drafts
        assert len(rank["layers_owned"]) == stage[rank["rank"]]
        layers = len(rank["layers_owned"]) + 2 + len(drafts)
        assert rank["kv_bytes"] == rank["blocks"] * layers * PAGE_BYTES
        assert rank["broadcasts"] == rank["forwards_with_history"] * sum(stage) > 0


def test_stock_model_runner_v1_cannot(workload):
    """Without KVPP: its first stage looks for a drafter, which only the last stage has."""
    synchronous = workload.engine | {"async_scheduling": False}
    with pytest.raises(RuntimeError, match="'CPUModelRunner' object has no attribute 'drafter'"):
        run_workloads([replace(workload, runner=1, engine=synchronous)])

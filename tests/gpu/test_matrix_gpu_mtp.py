"""vLLM's GPU worker with fixed-step MTP, streams delayed at random: tokens and drafts are those of KVPP off."""

from dataclasses import dataclass

import pytest

from tests.gpu.rounds import (
    Runs,
    run_rounds,
    test_every_request_differs_when_broadcasts_are_skipped,
    test_every_request_differs_when_compute_does_not_wait,
    test_the_worker_and_the_runner_are_the_gpu_s,
    test_tokens_are_those_without_kvpp,
)
from tests.gpu.test_gpu_tokens import RUNNERS
from tests.support.checkpoints import write_mtp_checkpoint
from tests.support.workload import Workload
from tests.vllm.test_matrix_mtp import LAYERS

__all__ = [
    "test_every_request_differs_when_broadcasts_are_skipped",
    "test_every_request_differs_when_compute_does_not_wait",
    "test_the_worker_and_the_runner_are_the_gpu_s",
    "test_tokens_are_those_without_kvpp",
]

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

TOKENS = 10


@dataclass(frozen=True, kw_only=True)
class DraftRuns(Runs):
    """steps: draft tokens a step."""

    steps: int


@pytest.fixture(scope="module", params=RUNNERS, ids="v{}".format)
def runner(request) -> int:
    return request.param


@pytest.fixture(scope="module", params=[1, 2], ids="k{}".format)
def runs(request, runner, prompts, library, tmp_path_factory) -> DraftRuns:
    """With two steps the one draft layer runs twice, the second time on its own output."""
    model = write_mtp_checkpoint(tmp_path_factory.mktemp("models") / "mtp", layers=LAYERS)
    workload = Workload(
        model=str(model),
        rounds=[],
        engine={
            "speculative_config": {"method": "mtp", "num_speculative_tokens": request.param},
            "kv_cache_memory_bytes": 32 << 20,
            "enable_prefix_caching": False,
        },
        runner=runner,
        device=library,
    )
    return DraftRuns(**vars(run_rounds(workload, prompts, tokens=TOKENS)), steps=request.param)


def test_some_drafts_are_right_and_it_takes_as_many_steps_as_without_kvpp(runs):
    """Asynchronous scheduling has placeholders for drafts; each draft that is right saves a step."""
    drafts = runs.off.drafts
    assert runs.off.async_scheduling
    assert runs.on.async_scheduling
    assert runs.on.drafts[: 2 * len(drafts)] == drafts * 2
    assert max(map(len, drafts)) == runs.steps
    assert 0 < runs.off.accepted < sum(map(len, drafts))


def test_every_rank_stores_the_draft_layer_for_itself(runs):
    for rank in runs.on.rpc["kvpp_stats"]:
        assert rank["draft_layers"] == [f"model.layers.{LAYERS}.self_attn.attn"]
        assert len(rank["layers_owned"]) == LAYERS // 2
        assert rank["forwards_with_history"] == runs.on.covered.with_history > 0

"""vLLM's GPU worker on more ranks and stages: groups of four, uneven pipeline stages, experts spread over a group."""

from dataclasses import dataclass, replace

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
from tests.vllm.test_matrix_parallel import tp2_ep, tp2_pp2, tp4

__all__ = [
    "test_every_request_differs_when_broadcasts_are_skipped",
    "test_every_request_differs_when_compute_does_not_wait",
    "test_the_worker_and_the_runner_are_the_gpu_s",
    "test_tokens_are_those_without_kvpp",
]

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

TOKENS = 6


@dataclass(frozen=True, kw_only=True)
class StageRuns(Runs):
    """owned[stage]: how many layers each rank of the stage must own."""

    owned: list[list[int]]


@pytest.fixture(scope="module", params=RUNNERS, ids="v{}".format)
def runner(request) -> int:
    return request.param


@pytest.fixture(scope="module", params=[tp4, tp2_pp2, tp2_ep], ids=lambda make: make.__name__)
def runs(request, runner, prompts, library, tmp_path_factory) -> StageRuns:
    workload, owned = request.param(tmp_path_factory.mktemp("models"))
    workload = replace(
        workload,
        engine=workload.engine | {"enable_prefix_caching": False},
        runner=runner,
        device=library,
    )
    return StageRuns(**vars(run_rounds(workload, prompts, tokens=TOKENS)), owned=owned)


def test_each_stage_deals_its_own_layers_to_its_own_group(runs):
    stats = runs.on.rpc["kvpp_stats"]
    found = [
        [len(rank["layers_owned"]) for rank in stats if rank["stage"] == stage]
        for stage in range(len(runs.owned))
    ]
    assert found == runs.owned
    for rank in stats:
        assert rank["forwards_with_history"] == runs.on.covered.with_history > 0


def test_batches_in_flight_are_those_of_the_stages(runs, runner):
    """And one more where scheduling is asynchronous, which vLLM has for stages on Model Runner V2 only."""
    stages = len(runs.owned)
    for run in (runs.off, runs.on, runs.skipped):
        assert run.async_scheduling == (stages == 1 or runner == 2)
        assert run.covered.in_flight == stages + run.async_scheduling


def test_experts_are_spread_over_the_group_where_asked_for(runs, request):
    spread = "tp2_ep" in request.node.name
    for run in (runs.off, runs.on, runs.skipped):
        assert [f"Worker_TP{rank}_EP{rank} " in run.log for rank in (0, 1)] == [spread, spread]

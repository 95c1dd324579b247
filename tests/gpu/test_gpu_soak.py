"""200 random requests on vLLM's GPU worker, everything of the scheduler on, all streams delayed at random."""

import pytest

from tests.gpu.conftest import on_device
from tests.gpu.test_gpu_tokens import RUNNERS
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, Workload, random_requests, run_workloads
from tests.vllm.test_matrix_scheduling import SCHEDULING

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1700)]

REQUESTS = 200
DELAYS = {"compute": 0.0005, "transfer": 0.001, "copy": 0.001}


@pytest.fixture(scope="module", params=RUNNERS)
def runs(request, checkpoint, library) -> dict[str, Outcome]:
    workload = Workload(
        model=checkpoint,
        rounds=[random_requests(REQUESTS, seed=7, longest=200)],
        engine=SCHEDULING,
        runner=request.param,
        device=library,
    )
    variants = {
        "off": on_device(workload, None),
        "on": on_device(workload, {"payload": "auto"}, Faults(delays=DELAYS)),
        "skipped": on_device(workload, {"skip_broadcasts": True}),
    }
    return dict(zip(variants, run_workloads(list(variants.values()), timeout_s=1600), strict=True))


def test_tokens_are_those_without_kvpp(runs):
    assert runs["on"].tokens == runs["off"].tokens


def test_most_requests_differ_when_broadcasts_are_skipped(runs):
    pairs = zip(runs["skipped"].tokens, runs["off"].tokens, strict=True)
    assert sum(left != right for left, right in pairs) > REQUESTS // 2


def test_the_run_covered_what_it_is_for(runs):
    covered = runs["on"].covered
    print(f"soak: {covered.text()}")
    assert covered.requests == REQUESTS
    assert covered.in_flight == 2
    assert covered.aborted >= 20
    assert covered.aborted_in_flight >= 10
    assert covered.prefix_hits >= 30
    assert covered.preemptions >= 10
    assert covered.chunks >= 50
    assert covered.mixed >= 50
    assert covered.with_history >= 200


def test_no_forward_is_left_open(runs):
    for rank in runs["on"].rpc["kvpp_stats"]:
        assert rank["forwards"] == runs["on"].covered.forwards
        assert rank["forwards_with_history"] == runs["on"].covered.with_history

"""200 random requests with everything on: MTP, chunks, prefix hits, preemption, asynchronous scheduling."""

import pytest

from tests.support.checkpoints import write_mtp_checkpoint
from tests.support.workload import Outcome, Workload, off_on_control, random_requests
from tests.vllm.test_matrix_mtp import LAYERS
from tests.vllm.test_matrix_scheduling import RESTORE, SCHEDULING

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]

REQUESTS = 200
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Outcome, Outcome, Outcome]:
    model = write_mtp_checkpoint(tmp_path_factory.mktemp("models") / "mtp", layers=LAYERS)
    return off_on_control(
        Workload(
            model=str(model),
            rounds=[random_requests(REQUESTS, seed=7, longest=200)],
            engine=SCHEDULING | MTP,
            restore=RESTORE,
        )
    )


def test_tokens_are_those_without_kvpp(runs):
    off, on, _ = runs
    assert on.tokens == off.tokens
    assert on.accepted == off.accepted


def test_most_requests_differ_when_broadcasts_are_skipped(runs):
    off, _, control = runs
    differing = sum(a != b for a, b in zip(control.tokens, off.tokens, strict=True))
    assert differing > REQUESTS // 2


def test_the_run_covered_what_it_is_for(runs):
    _, on, _ = runs
    covered = on.covered
    print(f"soak: {covered.text()}, drafts {len(on.drafts)}, accepted {on.accepted}")
    assert on.async_scheduling
    assert covered.in_flight == 2
    assert covered.requests == REQUESTS
    assert covered.aborted >= 20
    assert covered.aborted_in_flight >= 10
    assert covered.prefix_hits >= 30
    assert covered.preemptions >= 10
    assert covered.resumed >= 10
    assert covered.chunks >= 50
    assert covered.mixed >= 50
    assert covered.with_history >= 200
    assert on.accepted >= 100


def test_no_forward_is_left_open(runs):
    _, on, _ = runs
    for rank in on.rpc["kvpp_stats"]:
        assert rank["forwards"] == on.covered.forwards
        assert rank["forwards_with_history"] == on.covered.with_history

"""vLLM's GPU worker with all of the scheduler at once, on delayed streams: chunks, prefix hits, preemption, aborts."""

import pytest

from tests.gpu.conftest import on_device
from tests.gpu.test_gpu_tokens import DELAYS, RUNNERS
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, Workload, random_requests, run_workloads
from tests.vllm.test_matrix_scheduling import SCHEDULING

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1200)]

ON = {"auto": ({"payload": "auto"}, None), "turns": ({"payload": "active"}, "take_turns")}
MET = ("chunks", "mixed", "prefix_hits", "preemptions", "aborted", "aborted_in_flight")


@pytest.fixture(scope="module", params=RUNNERS)
def runs(request, checkpoint, library) -> dict[str, Outcome]:
    workload = Workload(
        model=checkpoint,
        rounds=[random_requests(24, seed=seed, longest=200) for seed in (1, 2)],
        engine=SCHEDULING,
        runner=request.param,
        device=library,
    )
    variants = {"off": on_device(workload, None)}
    for name, (settings, way) in ON.items():
        variants[name] = on_device(workload, settings, Faults(delays=DELAYS, way=way))
    variants["skipped"] = on_device(workload, {"skip_broadcasts": True})
    return dict(zip(variants, run_workloads(list(variants.values()), timeout_s=1100), strict=True))


@pytest.mark.parametrize("name", ON)
def test_tokens_are_those_without_kvpp(runs, name):
    assert runs[name].tokens == runs["off"].tokens
    assert runs[name].covered == runs["off"].covered
    for rank in runs[name].rpc["kvpp_stats"]:
        assert rank["forwards"] == runs[name].covered.forwards
        assert rank["forwards_with_history"] == runs[name].covered.with_history


def test_tokens_differ_when_broadcasts_are_skipped(runs):
    off = runs["off"].tokens
    long = [n for n, tokens in enumerate(off) if len(tokens) > 4]
    assert len(long) > len(off) // 2
    assert all(runs["skipped"].tokens[n] != off[n] for n in long)


@pytest.mark.parametrize("what", MET)
def test_the_run_met(runs, what):
    for run in runs.values():
        assert getattr(run.covered, what) > 0, run.covered.text()


def test_scheduling_was_asynchronous(runs):
    for run in runs.values():
        assert run.async_scheduling
        assert run.covered.in_flight == 2

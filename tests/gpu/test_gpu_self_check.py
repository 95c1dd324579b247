"""vLLM's GPU worker with a wait missing beneath KVPP: the engine refuses to start, on every rank, and says why."""

import re
from dataclasses import replace

import pytest

from tests.gpu.conftest import on_device
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, Workload, run_workloads, together

pytestmark = pytest.mark.timeout(900)

DROPPED = ("compute", "transfer", "copy")
V1, V2 = 1, pytest.param(2, marks=pytest.mark.matrix)
REFUSED = (
    r"SelfCheckError: The self check failed on rank {rank}: layer '[\w.]+' \(ordinal \d+\) did not hold what rank "
    r"\d had sent when compute might read it, in a forward of the way '[\w ]+'(, while the \w+ stream was late)?\. "
    r"The first wrong block is \d+ of '[\w.]+'"
)
ELSEWHERE = (
    r"SelfCheckError: The self check found nothing wrong on rank {rank}, but failed on another rank"
)


@pytest.fixture(scope="module", params=[V1, V2])
def runs(request, checkpoint, prompts, library) -> dict[str, Outcome]:
    """An engine that starts for the control, and one for each stream that ignores the waits it is given."""
    workload = Workload(
        model=checkpoint,
        rounds=[together(prompts[:2], max_tokens=3)],
        runner=request.param,
        device=library,
    )
    auto = {"payload": "auto"}
    variants = {"right": on_device(workload, auto)}
    for dropped in DROPPED:
        fault = on_device(workload, auto, Faults(dropped=dropped))
        variants[dropped] = replace(fault, refused=True)
    unchecked = auto | {"self_check": False}
    variants["not checked"] = on_device(workload, unchecked, Faults(dropped="compute"))
    return dict(zip(variants, run_workloads(list(variants.values())), strict=True))


@pytest.mark.parametrize("dropped", DROPPED)
def test_without_a_stream_s_waits_the_engine_refuses_to_start(runs, dropped):
    """No delay is added from outside."""
    log = runs[dropped].log
    named = [re.search(REFUSED.format(rank=rank), log) for rank in range(2)]
    assert any(named), log[-6000:]
    for rank in range(2):
        assert named[rank] or re.search(ELSEWHERE.format(rank=rank), log)
    assert "self check passed" not in log


def test_control_with_all_waits_it_starts_and_says_that_it_was_checked(runs):
    log = runs["right"].log
    for rank in range(2):
        assert re.search(rf"KVPP rank {rank}, stage 0: self check passed: \d+ forwards in [\d.]+ s", log)
    for stats in runs["right"].rpc["kvpp_stats"]:
        assert stats["forwards"] == runs["right"].covered.forwards


def test_control_unchecked_it_starts_all_the_same(runs):
    assert "self check" not in runs["not checked"].log
    assert [len(tokens) for tokens in runs["not checked"].tokens] == [3, 3]

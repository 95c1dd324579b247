"""All of the scheduler at once: chunked prefill, prefix caching, preemption and asynchronous scheduling, with
requests that are aborted while others go on, and the engine put to sleep in between.
"""

import pytest

from tests.support.workload import Outcome, Workload, off_on_control, random_requests, together

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

SCHEDULING = {
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 64,
    "async_scheduling": True,
    # The same few blocks with KVPP on and off: requests are preempted, and both runs compute the same batches.
    "num_gpu_blocks_override": 24,
    "max_model_len": 256,
}
RESTORE = ("chunked_prefill", "prefix_caching", "async_scheduling")


@pytest.fixture(scope="module")
def runs(checkpoint) -> tuple[Outcome, Outcome, Outcome]:
    rounds = [random_requests(24, seed=1, longest=200), random_requests(16, seed=2, longest=200)]
    return off_on_control(
        Workload(
            model=checkpoint,
            rounds=rounds,
            engine=SCHEDULING,
            restore=RESTORE,
            sleep_between=True,
        )
    )


def test_tokens_are_those_without_kvpp(runs):
    off, on, _ = runs
    assert on.tokens == off.tokens
    assert on.covered == off.covered


def test_tokens_differ_when_broadcasts_are_skipped(runs):
    off, _, control = runs
    long = [n for n, tokens in enumerate(off.tokens) if len(tokens) > 4]
    assert len(long) > len(off.tokens) // 2
    assert all(control.tokens[n] != off.tokens[n] for n in long)


@pytest.mark.parametrize(
    "what", ["chunks", "mixed", "prefix_hits", "preemptions", "resumed", "aborted", "aborted_in_flight"]
)
def test_the_run_met(runs, what):
    for run in runs:
        assert getattr(run.covered, what) > 0, run.covered.text()


def test_scheduling_was_asynchronous(runs):
    for run in runs:
        assert run.async_scheduling
        assert run.covered.in_flight == 2


def test_the_engine_slept_and_went_on(runs):
    for run in runs:
        assert run.slept == 1
        # vLLM's CPU worker has nothing to put to sleep: each of the two says so, going to sleep and waking up.
        assert run.log.count("sleep mode is not supported on CPU") == 4


def test_forwards_are_those_that_were_scheduled(runs):
    _, on, _ = runs
    for rank in on.rpc["kvpp_stats"]:
        assert rank["forwards"] == on.covered.forwards
        assert rank["forwards_with_history"] == on.covered.with_history


@pytest.fixture(scope="module")
def twins(checkpoint, prompts) -> tuple[Outcome, Outcome, Outcome]:
    """Two requests with one new prompt, which both fit into the first step."""
    prompt = next(prompt for prompt in prompts if len(prompt) == 40)
    return off_on_control(
        Workload(
            model=checkpoint,
            rounds=[together([prompt, prompt], max_tokens=8)],
            engine=SCHEDULING | {"async_scheduling": False},
            restore=RESTORE,
        )
    )


def test_a_prefix_hit_in_the_step_that_computes_it_gives_the_same_tokens(twins):
    off, on, control = twins
    assert on.covered.prefix_hits == 1
    # Eight forwards for eight tokens: the first one computed the prefix that it counts as computed.
    assert on.covered.forwards == on.covered.with_history == 8
    assert {rank["forwards_with_history"] for rank in on.rpc["kvpp_stats"]} == {8}
    assert on.tokens == off.tokens
    assert on.tokens[0] == on.tokens[1]
    assert control.tokens[0] != off.tokens[0]

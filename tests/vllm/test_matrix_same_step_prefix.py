"""Two requests with one new prefix in the same step (case 19): the second one's history is written beside it."""

import random

import pytest

from tests.support.workload import Outcome, Workload, off_on_control, together

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

SCHEDULING = {
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 40,
    "max_model_len": 256,
}


@pytest.fixture(scope="module")
def runs(checkpoint) -> tuple[Outcome, Outcome, Outcome]:
    rng = random.Random(5)
    prefix, *ends = ([rng.randrange(2, 300) for _ in range(n)] for n in (64, 3, 20))
    requests = together([prefix + end for end in ends], max_tokens=8)
    return off_on_control(
        Workload(
            model=checkpoint,
            rounds=[requests],
            engine=SCHEDULING,
            restore=("chunked_prefill", "prefix_caching"),
        )
    )


def test_the_second_request_has_computed_tokens_in_the_first_step(runs):
    for run in runs:
        assert run.covered.prefix_hits == 1
        assert run.covered.with_history == run.covered.forwards == 8


def test_tokens_are_those_without_kvpp(runs):
    off, on, _ = runs
    assert on.tokens == off.tokens


def test_tokens_differ_when_broadcasts_are_skipped(runs):
    off, _, control = runs
    assert all(a != b for a, b in zip(control.tokens, off.tokens, strict=True))

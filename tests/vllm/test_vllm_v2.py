"""Model Runner V2 in the default run: the smallest comparison that means something. See test_matrix_v2.py for more."""

import pytest

from kvpp_dag.errors import NotActiveError
from kvpp_vllm.seams import CPU_SEAMS, Seam, check_seams
from tests.support.workload import Outcome, Workload, off_on_control, together
from tests.vllm.conftest import LAYERS

TOKENS = 6


@pytest.fixture(scope="module")
def runs(checkpoint, prompts) -> tuple[Outcome, Outcome, Outcome]:
    rounds = [together(prompts[2:6], max_tokens=TOKENS)]
    return off_on_control(Workload(model=checkpoint, rounds=rounds, runner=2))


def test_model_runner_v2_ran(runs):
    assert all("Using V2 Model Runner" in run.log for run in runs)


def test_tokens_are_those_without_kvpp(runs):
    off, on, _ = runs
    assert [len(tokens) for tokens in off.tokens] == [TOKENS] * 4
    assert on.tokens == off.tokens


def test_every_request_differs_when_broadcasts_are_skipped(runs):
    off, _, control = runs
    assert all(left != right for left, right in zip(control.tokens, off.tokens, strict=True))


def test_figures_are_those_of_the_scheduled_forwards(runs):
    _, on, _ = runs
    for rank in on.rpc["kvpp_stats"]:
        assert rank["forwards"] == on.covered.forwards
        assert rank["forwards_with_history"] == on.covered.with_history == TOKENS - 1
        assert rank["broadcasts"] == LAYERS * on.covered.with_history
        assert rank["kv_bytes"] == on.num_blocks * 16 * 576 * 4 * (LAYERS // 2 + 2)


def test_seams_of_the_other_model_runner_are_not_needed():
    other = Seam(module="vllm.no_such_module", attribute="anything", use="a test", runner=2)
    check_seams((*CPU_SEAMS, other), runner=1)
    with pytest.raises(NotActiveError, match=r"vllm\.no_such_module\.anything"):
        check_seams((*CPU_SEAMS, other), runner=2)

"""Forwards of several ranks, threads and real processes, against one rank that holds everything."""

from functools import partial

import pytest

from kvpp_dag.graph import Policy
from tests.runtime_support import Died, reference, run_group
from tests.runtime_work import (
    Served,
    die,
    disagree_on_history,
    disagree_on_history_and_stop,
    disagree_on_layout,
    serve,
)

MIXED = (0, 1, 0, 1)
GROWING = (0, 1, 2, 0, 1, 2, 3)
KINDS = ["local", "gloo", "shared"]


def check(served, layers, blocks):
    outputs, caches = reference(layers, blocks)
    for rank in served:
        assert isinstance(rank, Served), rank
        assert rank.outputs == outputs
        assert rank.owned == {ordinal: caches[ordinal] for ordinal in rank.owned}
        assert rank.guards_intact
        assert rank.drafts_intact
    assert sorted(i for rank in served for i in rank.owned) == list(range(layers))


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("blocks", [MIXED, GROWING])
@pytest.mark.parametrize(("layers", "ranks"), [(5, 2), (7, 3), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_several_ranks_compute_what_one_rank_computes(kind, layers, ranks, blocks, policy):
    served = run_group(kind, ranks, partial(serve, layers=layers, blocks=blocks, policy=policy))
    check(served, layers, blocks)
    assert all(rank.slack_intact for rank in served)


@pytest.mark.parametrize("depth", [2, 3, 9])
@pytest.mark.parametrize("policy", list(Policy))
def test_any_prefetch_depth(depth, policy):
    work = partial(serve, layers=7, blocks=GROWING, policy=policy, depth=depth)
    check(run_group("local", 3, work), 7, GROWING)


def test_three_layers_two_slots_back_to_back():
    """The slot of the next forward's first layer is the one that the last layer has just read."""
    blocks = (0, 1, 2, 3, 4)
    check(run_group("gloo", 2, partial(serve, layers=3, blocks=blocks)), 3, blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_without_broadcasts_the_outputs_differ(kind):
    outputs, _ = reference(5, MIXED)
    work = partial(serve, layers=5, blocks=MIXED, skip_broadcasts=True)
    for rank in run_group(kind, 2, work):
        assert [a == b for a, b in zip(rank.outputs, outputs, strict=True)] == [True, False, True, False]


NANS = (0xFF, 0x7F)


@pytest.mark.parametrize("nan", NANS)
def test_stale_nan_in_scratch_is_never_seen(nan):
    check(run_group("local", 3, partial(serve, layers=7, blocks=MIXED, poison=nan)), 7, MIXED)


def test_stale_scratch_would_be_seen_if_nothing_were_received():
    """The control of the test above."""
    work = partial(serve, layers=7, blocks=MIXED, skip_broadcasts=True)
    first, second = (run_group("local", 3, partial(work, poison=nan))[0].outputs for nan in NANS)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True, False]


LAST = 4
FAILURES = {
    "one rank, first layer": {0: (3, 0)},
    "one rank, between": {1: (3, 2)},
    "one rank, last layer": {0: (3, LAST)},
    "all ranks, same layer": {0: (3, 2), 1: (3, 2)},
    "all ranks, different layers": {0: (3, 1), 1: (3, LAST)},
    "twice": {0: (1, 3), 1: (3, 0)},
    "without history": {0: (2, 1)},
}
BLOCKS = (0, 1, 0, 1, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_after_a_failed_forward_the_next_is_right_to_the_bit(kind, policy, fail):
    work = partial(serve, layers=5, blocks=BLOCKS, policy=policy, fail=fail)
    check(run_group(kind, 2, work), 5, BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_disagree_on_history_diverge(kind):
    """The forward without history sends nothing; the ranks meet with different forward numbers."""
    for failure, later in run_group(kind, 2, disagree_on_history):
        assert failure.startswith("diverged: ")
        assert "layers.0.attn" in failure
        assert "unusable" in later


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_never_sends_is_an_error_within_the_timeout(kind):
    (failure, later), output = run_group(kind, 2, disagree_on_history_and_stop, timeout=1.0)
    assert failure.startswith("failed: ")
    assert "unusable" in later
    assert isinstance(output, str)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_planned_differently_diverge(kind):
    for failure, later in run_group(kind, 2, disagree_on_layout):
        assert failure.startswith("diverged: ")
        assert "unusable" in later


@pytest.mark.parametrize("layer", [0, 2, LAST])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_peer_that_died_is_an_error_within_the_timeout(kind, layer):
    survivor, dead = run_group(kind, 2, partial(die, layer=layer), timeout=5.0)
    assert isinstance(dead, Died)
    assert dead.args == (3,)
    failure, later, seconds = survivor
    assert failure.startswith("failed: Forward ")
    assert "of rank 0 failed while layer " in failure
    assert "peer" in failure
    assert "unusable since forward " in later
    assert seconds < 20


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_ranks_that_are_left_all_notice_a_death(kind):
    *survivors, dead = run_group(kind, 3, partial(die, layer=1, dying=2), timeout=5.0)
    assert isinstance(dead, Died)
    for failure, later, _ in survivors:
        assert failure.startswith("failed: ")
        assert "unusable" in later

"""The critical path: by hand on small timelines, and what holds for any of them."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from kvpp_dag.graph import Kind, Policy
from kvpp_dag.trace.critical import critical_path, end_of
from tests.trace.timelines import Timeline, timelines


def path(timeline, rank=0):
    """Steps as (node, duration, kind)."""
    return [
        (step.node, step.end - step.start, step.kind) for step in critical_path(record(timeline, rank))
    ]


def record(timeline, rank=0):
    return timeline.recordings()[rank].forwards[0]


def computed(node, duration):
    return (node, duration, Kind.COMPUTE)


def sent(node, duration):
    return (node, duration, Kind.BROADCAST)


def test_where_transfers_are_hidden_it_is_the_compute():
    assert path(Timeline(layers=2, transfers={0: 2})) == [
        computed("prologue", 3),
        computed("attend[0]", 2),
        computed("compute[0]", 6),
        computed("attend[1]", 2),
        computed("compute[1]", 6),
    ]


def test_where_the_link_is_slower_it_is_the_transfers():
    assert path(Timeline(layers=3, transfer=10)) == [
        sent("broadcast[0]", 10),
        sent("broadcast[1]", 10),
        sent("broadcast[2]", 10),
        computed("attend[2]", 2),
        computed("compute[2]", 6),
    ]


def test_it_goes_from_a_late_transfer_to_what_held_it():
    """broadcast[5] had to wait for attend[3], not for broadcast[4]."""
    slot = Timeline(
        layers=6, policy=Policy.ON_RELEASE, attend=9, compute=1, transfer=4, transfers={0: 2, 5: 16}
    )
    assert path(slot)[-4:] == [
        computed("attend[3]", 9),
        sent("broadcast[5]", 16),
        computed("attend[5]", 9),
        computed("compute[5]", 1),
    ]


@pytest.mark.parametrize(
    ("delay", "node"),
    [("idle", "attend[1]"), ("wake", "broadcast[1]"), ("resume", "attend[1]")],
)
def test_time_of_the_host_leads_to_the_node_it_delayed(delay, node):
    timeline = replace(Timeline(layers=2, transfers={0: 2}), **{delay: {(r, 1): 30 for r in (0, 1)}})
    assert (node, 30, None) in path(timeline)
    assert not any(kind is None for _, _, kind in path(Timeline(layers=2, transfers={0: 2})))


def test_the_host_at_the_end_leads_to_no_node():
    ended = replace(record(Timeline(layers=1)), ended=10_000)
    step = critical_path(ended)[-1]
    assert (step.node, step.end, step.kind) == ("", 10_000, None)


def test_a_forward_in_flight_ends_at_the_last_time_known():
    whole = record(Timeline(layers=2))
    assert end_of(replace(whole, ended=0)) == whole.ended
    assert critical_path(replace(whole, ended=0)) == critical_path(whole)


def test_a_forward_of_which_nothing_is_known():
    empty = replace(record(Timeline()), ended=0, spans={}, waits={}, submitted={})
    assert critical_path(empty) == ()


@given(timeline=timelines())
def test_it_leads_without_a_gap_from_begin_to_end(timeline):
    for recording in timeline.recordings():
        (forward,) = recording.forwards
        steps = critical_path(forward)
        assert all(a.end == b.start for a, b in pairwise(steps))
        assert all(step.start < step.end for step in steps)
        assert sum(step.end - step.start for step in steps) == forward.ended - forward.began
        if steps:
            assert (steps[0].start, steps[-1].end) == (forward.began, forward.ended)


@given(timeline=timelines())
def test_its_nodes_run_one_after_the_other(timeline):
    for recording in timeline.recordings():
        (forward,) = recording.forwards
        for step in critical_path(forward):
            if step.kind is not None:
                span = forward.spans[step.node]
                assert span.start <= step.start
                assert step.end <= span.end


@given(timeline=timelines(quiet=True))
def test_shortening_a_node_on_it_shortens_the_forward_by_no_more(timeline):
    """With ranks that are alike, and for a transfer: it is on the path, or changing it changes nothing."""
    before = record(timeline)
    on_path = {step.node for step in critical_path(before)}
    for layer in range(timeline.layers):
        took = timeline.transfers.get(layer, timeline.transfer)
        if took:
            shorter = replace(timeline, transfers={**timeline.transfers, layer: took - 1})
            gain = before.ended - record(shorter).ended
            assert gain in (0, 1)
            assert gain == 0 or f"broadcast[{layer}]" in on_path

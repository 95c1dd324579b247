"""Bounds of a forward: by hand, against the timeline played without transfers or compute, and as properties."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_dag.errors import GraphError
from kvpp_dag.graph import Policy
from kvpp_dag.trace.replay import bounds
from kvpp_dag.trace.transfers import transfers
from tests.builders import changed
from tests.trace.timelines import Timeline, timelines


def bounds_of(timeline, rank=0):
    recordings = timeline.recordings()
    records = {recording.rank: recording.forwards[0] for recording in recordings}
    record = records.pop(rank)
    return bounds(record, transfers(record, records))


def duration(timeline, rank=0):
    (record,) = timeline.recordings()[rank].forwards
    return record.ended - record.began


def exposed(timeline, rank=0):
    (record,) = timeline.recordings()[rank].forwards
    return sum(wait.duration for wait in record.waits.values())


def test_bounds_by_hand():
    """Prologue 3 and three layers of 8; three transfers of 10."""
    assert bounds_of(Timeline(layers=3, transfer=10)) == (27, 30)


def test_time_of_the_host_is_kept_with_free_transfers():
    timeline = Timeline(layers=3, transfer=10, idle={(0, 2): 7, (1, 2): 7})
    assert bounds_of(timeline) == (34, 30)


def test_waiting_for_a_late_rank_is_no_part_of_a_transfer():
    timeline = Timeline(layers=3, transfer=10, computes={(1, 0): 50})
    assert bounds_of(timeline)[1] == 30


@given(timeline=timelines())
def test_free_transfers_leave_what_was_not_exposed(timeline):
    for rank in range(timeline.ranks):
        assert bounds_of(timeline, rank)[0] == duration(timeline, rank) - exposed(timeline, rank)


@given(timeline=timelines(quiet=True))
def test_free_transfers_are_the_timeline_without_transfers(timeline):
    free = replace(timeline, transfer=0, transfers={})
    assert bounds_of(timeline)[0] == duration(free)


@given(timeline=timelines(quiet=True))
def test_free_compute_is_the_timeline_without_compute(timeline):
    free = replace(timeline, prologue=0, attend=0, compute=0)
    assert bounds_of(timeline)[1] == min(duration(free), duration(timeline))


@given(timeline=timelines())
def test_no_bound_is_above_what_was_measured(timeline):
    for rank in range(timeline.ranks):
        assert max(bounds_of(timeline, rank)) <= duration(timeline, rank)


@given(timeline=timelines(), layer=st.integers(0, 7), more=st.integers(1, 30))
def test_bounds_grow_with_what_they_are_made_of(timeline, layer, more):
    took = timeline.transfers.get(layer, timeline.transfer)
    slower_link = replace(timeline, transfers={**timeline.transfers, layer: took + more})
    busier = replace(timeline, attend=timeline.attend + more)
    assert bounds_of(slower_link)[1] >= bounds_of(timeline)[1]
    assert bounds_of(busier)[0] >= bounds_of(timeline)[0]


def test_a_forward_whose_last_part_never_ran():
    (record,) = Timeline(layers=3, transfer=10, policy=Policy.ON_RELEASE).recordings()[0].forwards
    kept = {
        node: span for node, span in record.spans.items() if node.endswith("[0]") or node == "prologue"
    }
    partial = replace(record, spans=kept, waits={}, ended=0, error="gone")
    free_transfers, free_compute = bounds(partial, transfers(partial, {}))
    assert 0 < free_transfers <= record.ended - record.began
    assert free_compute == 10


def test_a_graph_with_a_cycle_cannot_be_replayed():
    (record,) = Timeline(layers=3).recordings()[0].forwards
    ring = changed(record.graph, "attend[0]", after=("compute[2]",))
    with pytest.raises(GraphError, match="cycle"):
        bounds(replace(record, graph=ring), {})

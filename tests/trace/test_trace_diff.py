"""Differences of graphs and recordings: each found where it was made, and none where there is none."""

from dataclasses import replace

import pytest
from hypothesis import given

from kvpp_dag.graph import Policy
from kvpp_dag.graph.diff import Change, GraphDiff, Move, diff_graphs
from kvpp_dag.trace import Span
from kvpp_dag.trace.diff import Figure, diff_recordings
from tests.builders import changed, compute, forward, group, stage, swapped
from tests.graph.graph_strategies import graphs
from tests.trace.recordings import odd_recordings, real_recordings
from tests.trace.timelines import Timeline


@given(graphs())
def test_a_graph_does_not_differ_from_itself(graph):
    assert diff_graphs(graph, replace(graph)) == GraphDiff()
    assert diff_graphs(graph, graph).equal


@given(graphs(), graphs())
def test_graphs_differ_exactly_if_they_are_unequal(a, b):
    """Up to what the diff says it leaves out: buffers between ranks, and order between streams."""
    found = diff_graphs(a, b)
    if found.equal:
        assert a.rank == b.rank
        assert set(a.nodes) == set(b.nodes)
        for stream in {node.stream for node in a.nodes}:
            assert [n for n in a.nodes if n.stream == stream] == [
                n for n in b.nodes if n.stream == stream
            ]
    else:
        assert a != b


def test_settings():
    a, b = forward(4), forward(4, depth=2)
    fields = [change.field for change in diff_graphs(a, b).settings]
    assert fields == ["layout_hash", "depth"]
    assert Change(field="depth", a=1, b=2) in diff_graphs(a, b).settings


def test_nodes_and_edges_only_in_one():
    a = forward(3)
    more = replace(a, nodes=(*a.nodes, compute("sample", after=("compute[2]",))))
    assert diff_graphs(a, more) == GraphDiff(
        nodes_only_b=("sample",), edges_only_b=(("compute[2]", "sample"),)
    )
    assert diff_graphs(more, a) == GraphDiff(
        nodes_only_a=("sample",), edges_only_a=(("compute[2]", "sample"),)
    )


@pytest.mark.parametrize(
    ("field", "value"), [("owner", 0), ("slot", 1), ("bytes", 7), ("writes", ("x",))]
)
def test_fields_of_a_node(field, value):
    a = forward(3)
    b = changed(a, "broadcast[2]", **{field: value})
    (change,) = diff_graphs(a, b).changes
    assert (change.node, change.field) == ("broadcast[2]", field)
    assert diff_graphs(a, b) == GraphDiff(changes=(change,))


def test_two_ranks_differ_in_their_rank_alone():
    a, b = group(5, 2)
    assert a.nodes != b.nodes
    assert diff_graphs(a, b) == GraphDiff(settings=(Change(field="rank", a=0, b=1),))


def test_order_on_a_stream():
    a = forward(3, history=False)
    i, j = a.position["attend[1]"], a.position["compute[1]"]
    (move,) = diff_graphs(a, swapped(a, i, j)).moves
    assert {move.node} <= {"attend[1]", "compute[1]"}
    assert move.stream == "compute"
    assert diff_graphs(a, swapped(a, i, j)) == GraphDiff(moves=(move,))


def test_policies_differ_in_when_the_host_issues_transfers():
    a, b = forward(4), forward(4, policy=Policy.ON_RELEASE)
    found = diff_graphs(a, b)
    assert found.nodes_only_a == found.nodes_only_b == found.edges_only_a == found.changes == ()
    assert Move(node="ready[2]", stream="compute", a="compute[0]", b="attend[0]") in found.moves
    assert {move.node for move in found.moves} == {"ready[1]", "ready[2]", "ready[3]"}


def test_as_few_nodes_as_possible_are_said_to_have_moved():
    a = forward(6, history=False)
    first, *rest = a.nodes
    (move,) = diff_graphs(a, replace(a, nodes=(*rest, first))).moves
    assert (move.node, move.a, move.b) == (first.id, None, rest[-1].id)


@given(odd_recordings())
def test_a_recording_does_not_differ_from_itself(recording):
    found = diff_recordings(recording, replace(recording))
    assert found.equal
    assert (found.settings, all(kind.moves == () for kind in found.kinds)) == ((), True)


def test_real_recordings_of_two_ranks_differ():
    a, b = real_recordings()
    assert diff_recordings(a, a).equal
    found = diff_recordings(a, b)
    assert found.settings == (Change(field="rank", a=0, b=1),)
    assert [kind.history for kind in found.kinds] == [True, False]
    moved = {move.name for move in found.kinds[0].moves}
    assert "whole forward" in moved
    assert len(moved) > 1


def one(**settings):
    return Timeline(layers=6, **settings).recordings()[0]


def moves_of(a, b):
    (kind,) = diff_recordings(a, b).kinds
    assert kind.graph.equal
    return {move.layer: move for move in kind.moves}


def test_a_longer_transfer_is_found_with_what_it_pushes():
    a, b = one(compute=20), one(compute=20, transfers={3: 9})
    moves = moves_of(a, b)
    assert set(moves) == {None, 3}
    assert moves[3].transfer == Figure(a=5, b=9)
    assert (moves[3].transfer.by, moves[3].transfer.percent) == (4, 80.0)
    assert moves[3].start.by == moves[3].exposed.by == 0
    assert moves[3].name == "layers.3"
    assert moves[None].transfer.by == 4
    assert moves[None].start.by == 0  # it was hidden


def test_a_transfer_that_is_not_hidden_pushes_the_layers_after_it():
    moves = moves_of(one(), one(transfers={3: 30}))
    assert moves[3].exposed.by == moves[4].start.by == moves[5].start.by == moves[None].start.by
    assert moves[3].exposed.by > 0
    assert moves[3].exposed.percent is None or moves[3].exposed.percent > 0
    assert {0, 1, 2}.isdisjoint(moves)


def test_medians_are_over_the_forwards_of_a_kind():
    a = one()
    (record,) = a.forwards
    slow = one(transfers={3: 900}).forwards[0]
    three = [replace(r, number=i) for i, r in enumerate([record, slow, record])]
    assert moves_of(a, replace(a, forwards=tuple(three[:1]))) == {}
    found = diff_recordings(replace(a, forwards=(record,) * 3), replace(a, forwards=tuple(three)))
    assert found.equal
    assert not diff_recordings(a, replace(a, forwards=(slow,))).equal


def test_failed_forwards_and_kinds_in_one_recording_only_are_counted():
    a = one()
    failed = replace(
        a.forwards[0], error="ValueError: x", spans={"prologue": Span(1000, 1001)}, waits={}
    )
    found = diff_recordings(a, replace(a, forwards=(failed,)))
    assert found.settings == (
        Change(field="forwards with history", a=1, b=0),
        Change(field="failed forwards", a=0, b=1),
    )
    assert found.kinds == ()


def test_plans_differ_in_depth_owners_and_bytes():
    a = one()
    found = diff_recordings(a, one(depth=2))
    assert Change(field="depth", a=1, b=2) in found.settings
    plan = stage(6, 2)
    owners = replace(plan, owners=(1, *plan.owners[1:]))
    found = diff_recordings(a, replace(a, plan=owners))
    assert found.settings == (Change(field="owner of layer 0", a=0, b=1),)
    assert diff_recordings(a, replace(a, plan=None)).settings == (
        Change(field="plan", a="given", b="none"),
    )
    assert Change(field="layers", a=6, b=5) in diff_recordings(a, replace(a, plan=stage(5, 2))).settings


def test_policies_differ_in_structure_and_times():
    (kind,) = diff_recordings(one(compute=20), one(compute=20, policy=Policy.ON_RELEASE)).kinds
    assert [change.field for change in kind.graph.settings] == ["policy"]
    assert kind.graph.moves
    assert all(move.start.by < 0 for move in kind.moves if move.layer in (2, 3))

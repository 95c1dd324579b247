"""The judge of the verifier's tests must itself see each kind of fault, and none where there is none."""

import random
from dataclasses import replace

import pytest

from kvpp_dag.graph import Policy, from_text, without_edge
from tests.builders import changed, edges, forward, group
from tests.graph.random_dags import random_graph
from tests.judge import _World, fault_by_closure, fault_of

HEADER = "# kvpp graph rank=0 ranks=1 layout=- history=true policy=on_acquire depth=1"


def _text(*lines):
    return from_text("\n".join([HEADER, *lines]))


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["a writes=x", "b stream=side reads=x"], "race"),
        (["a writes=x", "b stream=side writes=x"], "race"),
        (["a reads=x", "b stream=side reads=x"], None),
        (["a writes=x", "b stream=side reads=x after a", "c after b"], None),
        (["a writes=x", "b stream=side reads=x after a"], "race"),  # b with the next forward's a
        (["attend[1] writes=x", "attend[0] reads=x"], "content"),
        (["attend[0] writes=x", "compute[0] reads=x"], None),
        (["attend[0] reads=scratch[0]"], "content"),
        (["compute[0] reads=scratch[0] after attend[0]", "attend[0] writes=scratch[0]"], "deadlock"),
        (["a after b", "b stream=side after a"], "deadlock"),
        (["a after b", "b stream=side"], None),
        (["broadcast[0] writes=x"], "unjoined"),
        (["broadcast[0] writes=x", "a after broadcast[0]"], None),
        (
            ["broadcast[0]", "broadcast[1] stream=side", "a after broadcast[0],broadcast[1]"],
            "collectives",
        ),
        (
            ["broadcast[0] after broadcast[1]", "broadcast[1] stream=side", "a after broadcast[0]"],
            "collectives",
        ),
    ],
)
def test_faults_of_one_rank(lines, fault):
    graph = _text(*lines)
    found = fault_of([[graph, graph]])
    assert (found and found.split(":")[0]) == fault


def test_an_owner_that_sends_something_else_than_the_forward_before_wrote():
    graph = _text(
        "attend[0] writes=p", "broadcast[0] reads=p after attend[0]", "compute[0] after broadcast[0]"
    )
    assert fault_of([[graph, graph]]) is None
    assert fault_of([[graph, graph]], exact=True).startswith("content")


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(("layers", "ranks"), [(1, 2), (2, 2), (3, 2), (2, 3)])
def test_compiled_groups_have_no_fault_in_any_execution_of_all_ranks(policy, layers, ranks):
    """Case 3: across two forwards the owner sends exactly what the first one wrote."""
    for depth in (1, 2) if ranks == 2 else (1,):
        forwards = group(layers, ranks, policy=policy, depth=depth)
        assert fault_of([[graph, graph] for graph in forwards], exact=True) is None


def test_ranks_that_mean_different_transfers():
    first, second = group(2)
    assert fault_of([[first], [second]]) is None
    fewer = forward(1, rank=1)
    assert fault_of([[first], [fewer]]) == "deadlock"
    assert fault_of([[first], [changed(second, "broadcast[0]", bytes=1)]]).startswith("collectives")


def test_ranks_whose_hosts_issue_two_groups_in_different_orders():
    """Found where a device runs one collective after another, and only there."""
    first, second = group(3)
    other = forward(3, rank=1, policy=Policy.ON_RELEASE)
    assert fault_of([[first], [second]]) is None
    assert fault_of([[first], [other]]) == "deadlock"
    without = [
        replace(g, nodes=tuple(replace(n, collectives=()) for n in g.nodes)) for g in (first, other)
    ]
    assert fault_of([[graph] for graph in without]) is None


def test_collectives_of_one_group_must_not_overtake_each_other():
    graph = _text("a collectives=tp", "b stream=side collectives=tp")
    assert fault_of([[graph]]) == "collectives: b overtakes another"
    assert fault_of([[changed(graph, "b", collectives=("ep",))]]) is None
    assert fault_of([[changed(graph, "b", after=("a",))]]) is None


def test_the_closure_judge_sees_races_rings_and_unjoined_transfers():
    graph = forward(3, 4, rank=3)
    assert fault_by_closure(graph) is None
    assert fault_by_closure(without_edge(graph, "ready[2]", "broadcast[2]")).startswith("race")
    assert fault_by_closure(without_edge(graph, "completion[2]", "attend[2]")).startswith("race")
    assert fault_by_closure(changed(graph, "ready[0]", after=("attend[2]",))) == "deadlock"
    alone = changed(
        changed(graph, "attend[2]", after=(), reads=(), writes=()), "broadcast[2]", writes=()
    )
    assert fault_by_closure(alone) == "unjoined: broadcast[2]"


@pytest.mark.parametrize("policy", Policy)
def test_the_closure_judge_agrees_with_the_search(policy):
    faults = []
    for layers, ranks, depth in [(3, 2, 1), (4, 3, 1), (4, 2, 2)]:
        graph = forward(layers, ranks, rank=ranks - 1, policy=policy, depth=depth)
        for edge in edges(graph):
            broken = without_edge(graph, *edge)
            faults.append(fault_of([[broken, broken]]))
            assert bool(fault_by_closure(broken)) == bool(faults[-1])
    assert sum(map(bool, faults)) > 10
    assert None in faults


def test_what_nobody_can_tell_the_order_of_need_not_be_tried_in_every_order(monkeypatch):
    """The search that goes through more states comes to the same verdicts."""
    graphs = [random_graph(random.Random(seed)) for seed in range(300)]
    short = [fault_of([[graph, graph]]) is None for graph in graphs]
    monkeypatch.setattr(_World, "instants_first", False)
    assert [fault_of([[graph, graph]]) is None for graph in graphs] == short
    assert 30 < sum(short) < 270


def test_a_broadcast_brings_what_its_owner_sends():
    """Same name, owner and size, but another layer: only the ranks together show it."""
    send = _text("broadcast[0] layer=1 owner=0 reads=persistent[1]", "attend[1] after broadcast[0]")
    lines = ["broadcast[0] owner=0 writes=scratch[0]", "attend[0] reads=scratch[0] after broadcast[0]"]
    receive = from_text("\n".join([HEADER.replace("rank=0 ranks=1", "rank=1 ranks=2"), *lines]))
    right = changed(send, "broadcast[0]", layer=0)
    assert fault_of([[right], [receive]]) is None
    assert fault_of([[receive]]) is None
    assert fault_of([[send], [receive]]).startswith("content: attend[0] finds (1, 0, 0)")
    nothing = changed(right, "broadcast[0]", reads=())
    assert fault_of([[nothing], [receive]]).startswith("content")


def test_a_broadcast_that_names_another_slot_than_it_writes_is_read_both_ways():
    lines = ["broadcast[0] owner=1 slot=0 writes=scratch[1]"]
    for slot in (0, 1):
        text = [*lines, f"attend[0] reads=scratch[{slot}] after broadcast[0]"]
        graph = _text(*text)
        assert fault_of([[graph]]).startswith("content")
    right = changed(graph, "broadcast[0]", slot=1)
    assert fault_of([[right]]) is None

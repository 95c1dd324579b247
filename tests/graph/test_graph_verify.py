from dataclasses import replace
from itertools import product

import networkx as nx
import pytest

from kvpp_dag.errors import UnsoundGraphError
from kvpp_dag.graph import (
    Graph,
    Kind,
    Policy,
    ensure_sound,
    from_text,
    verify,
    verify_alone,
    verify_group,
    without_edge,
)
from tests.builders import changed, edges, forward, group
from tests.judge import fault_of

BOTH = pytest.mark.parametrize("policy", Policy)


def rules(findings):
    return {finding.rule for finding in findings}


def _text(*lines, rank=0, ranks=1):
    header = f"# kvpp graph rank={rank} ranks={ranks} layout=- history=true policy=on_acquire depth=1"
    return from_text("\n".join([header, *lines]))


@BOTH
@pytest.mark.parametrize("history", [True, False])
def test_compiled_forwards_are_sound(policy, history):
    for layers, ranks, depth in product(range(8), range(1, 5), (1, 2, 3)):
        graphs = group(layers, ranks, policy=policy, depth=depth, history=history)
        assert verify_group(graphs) == ()


@BOTH
def test_forwards_with_and_without_history_may_follow_each_other(policy):
    for layers, ranks, depth in product((1, 2, 3, 5), (2, 3), (1, 2)):
        for rank in range(ranks):
            kinds = [
                forward(layers, ranks, rank=rank, policy=policy, depth=depth, history=history)
                for history in (True, False)
            ]
            ensure_sound(kinds)
            assert all(fault_of([[a, b]]) is None for a in kinds for b in kinds)


def _path_over_two_forwards(graph: Graph) -> nx.DiGraph:
    dag, last = nx.DiGraph(), {}
    for number in (0, 1):
        for node in graph.nodes:
            name = (number, node.id)
            dag.add_edges_from(((number, before), name) for before in node.after)
            if node.stream in last:
                dag.add_edge(last[node.stream], name)
            last[node.stream] = name
    return dag


@BOTH
def test_each_broadcast_waits_for_the_last_reader_of_its_slot_across_the_wrap(policy):
    """Case 1: 3 layers on 2 slots; slot 0 is read by layers 0 and 2, slot 1 by layer 1."""
    dag = _path_over_two_forwards(forward(3, 4, rank=3, policy=policy))
    last_readers = [((0, 0), (0, 2)), ((0, 2), (1, 0)), ((0, 1), (1, 1)), ((1, 0), (1, 2))]
    for (n, i), (m, j) in last_readers:
        assert nx.has_path(dag, (n, f"attend[{i}]"), (m, f"broadcast[{j}]"))


@BOTH
def test_a_forward_whose_first_transfers_do_not_wait_for_the_one_before_is_rejected(policy):
    """Case 1: ready events off the compute stream keep the edges inside a forward, and lose the wrap."""
    graph = forward(3, 4, rank=3, policy=policy)
    for i in range(3):
        graph = changed(graph, f"ready[{i}]", stream="side")
    assert verify_alone(graph) == ()
    races = [f for f in verify(graph) if f.rule == "race"]
    assert ("attend[2]", "broadcast[0]") in [f.nodes for f in races]
    assert all("of the next forward" in f.message for f in races)
    assert fault_of([[graph, graph]]).startswith("race")


def test_a_transfer_nobody_waits_for_is_rejected():
    """Case 30."""
    lines = ["broadcast[0] writes=x", "completion[0] after broadcast[0]", "a"]
    (finding,) = verify(_text(*lines))
    assert (finding.rule, finding.nodes) == ("unjoined", ("broadcast[0]",))
    assert verify(_text(*lines[:2], "a after completion[0]")) == ()


@BOTH
def test_dropping_the_waiter_of_a_completion_event_is_rejected(policy):
    """Case 30, on the last transfer: nothing else waits for it."""
    graph = forward(3, rank=0, policy=policy)
    findings = verify(without_edge(graph, "completion[2]", "attend[2]"))
    assert rules(findings) == {"race", "unjoined"}
    assert ("broadcast[2]",) in [f.nodes for f in findings if f.rule == "unjoined"]


def test_a_race_names_the_buffer_and_exactly_the_two_nodes():
    graph = forward(3, 4, rank=3, policy=Policy.ON_RELEASE)
    (race,) = verify_alone(without_edge(graph, "ready[2]", "broadcast[2]"))
    assert (race.rule, race.rank) == ("race", 3)
    assert set(race.nodes) == {"attend[0]", "broadcast[2]"}
    assert "race on scratch[0] of rank 3" in race.message
    assert all(name in race.message for name in race.nodes)


def test_a_transfer_into_another_slot_is_rejected():
    graph = forward(4, rank=0)
    assert graph["broadcast[2]"].writes == ("scratch[0]",)
    findings = verify(changed(graph, "broadcast[2]", writes=("scratch[1]",), slot=1))
    assert "content" in rules(findings)
    assert any("attend[2]" in f.nodes for f in findings)


def test_a_layer_that_reads_another_slot_is_rejected():
    graph = forward(4, rank=0)
    wrong = changed(graph, "attend[2]", reads=("scratch[1]",), writes=("scratch[1]",))
    findings = verify(wrong)
    assert rules(findings) == {"race"}
    assert set(findings[0].nodes) == {"broadcast[3]", "attend[2]"}


def test_a_layer_that_reads_another_layers_cache_is_rejected():
    graph = forward(4, rank=0)
    assert graph["attend[1]"].reads == ("persistent[1]",)
    wrong = changed(graph, "attend[1]", reads=("persistent[0]",))
    findings = [f for f in verify(wrong) if f.rule == "content"]
    assert findings[0].nodes == ("attend[0]", "attend[1]")


def test_scratch_read_without_its_transfer_is_rejected():
    """The layer would find what the forward before left there."""
    graph = forward(2, rank=0)
    kept = tuple(n for n in graph.nodes if n.layer != 1 or n.kind is Kind.COMPUTE)
    skipped = replace(graph, nodes=tuple(replace(n, after=()) if n.layer == 1 else n for n in kept))
    messages = [f.message for f in verify(skipped)]
    assert any("which nothing wrote before" in m for m in messages)
    assert any("one forward earlier" in m for m in messages)
    assert fault_of([[skipped, skipped]]).startswith("content")


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"slot": 1}, id="slot"),
        pytest.param({"owner": 0}, id="owner-that-writes"),
        pytest.param({"owner": 2}, id="owner-outside-the-group"),
        pytest.param({"writes": ()}, id="receiver-that-writes-nothing"),
        pytest.param({"reads": ("persistent[2]",)}, id="receiver-that-reads"),
    ],
)
def test_a_broadcast_that_contradicts_its_own_owner_or_slot_is_rejected(fields):
    graph = forward(4, rank=0)
    node = graph["broadcast[2]"]
    assert (node.owner, node.slot, node.writes, node.reads) == (1, 0, ("scratch[0]",), ())
    assert verify(graph) == ()
    findings = [f for f in verify(changed(graph, "broadcast[2]", **fields)) if f.rule == "content"]
    assert any(f.nodes == ("broadcast[2]",) and "contradicts itself" in f.message for f in findings)


def test_a_ring_of_waits_is_a_deadlock():
    graph = changed(forward(2), "ready[1]", after=("completion[1]",))
    (finding,) = verify(graph)
    assert finding.rule == "deadlock"
    assert finding.nodes[0] == finding.nodes[-1]
    assert {"ready[1]", "broadcast[1]", "completion[1]"} <= set(finding.nodes)
    assert fault_of([[graph, graph]]) == "deadlock"


def test_a_stream_that_contradicts_an_edge_is_a_deadlock():
    assert rules(verify(_text("a after b", "b"))) == {"deadlock"}
    assert verify(_text("b", "a after b")) == ()


def test_collectives_on_two_streams_must_be_ordered_by_a_path():
    """Case 10."""
    join = "a after completion[0],completion[1]"
    tail = ["completion[0] after broadcast[0]", "completion[1] stream=two after broadcast[1]", join]
    unordered = _text("broadcast[0]", "broadcast[1] stream=two", *tail)
    ordered = _text("broadcast[0]", "broadcast[1] stream=two after broadcast[0]", *tail)
    assert rules(verify_alone(unordered)) == {"collectives"}
    assert verify_alone(ordered) == ()


def test_collectives_must_be_ordered_across_the_wrap_too():
    """Case 10: the next forward's first transfer may overtake this one's last."""
    lines = [
        "broadcast[0]",
        "broadcast[1] stream=two after broadcast[0]",
        "a after broadcast[0],broadcast[1]",
    ]
    graph = _text(*lines)
    assert verify_alone(graph) == ()
    (finding,) = verify(graph)
    assert (finding.rule, finding.nodes) == ("collectives", ("broadcast[1]", "broadcast[0]"))
    joined = _text("start", "broadcast[0] after start", *lines[1:])
    assert verify(joined) == ()


def test_collectives_must_run_in_the_order_in_which_they_are_listed():
    """Case 10: both orders have a path, so only the listing lets ranks be compared."""
    lines = ["broadcast[0] after broadcast[1]", "broadcast[1] stream=two", "a after broadcast[0]"]
    assert "collectives" in rules(verify_alone(_text(*lines)))


def test_every_pair_of_collectives_must_be_ordered_not_only_neighbours():
    lines = ["broadcast[0]", "broadcast[1] stream=two after broadcast[0],broadcast[2]"]
    lines += ["broadcast[2] stream=three", "a after broadcast[1]"]
    graph = _text(*lines)
    assert fault_of([[graph]]).startswith("collectives")
    assert "collectives" in rules(verify_alone(graph))


@BOTH
def test_ranks_that_differ_are_rejected(policy):
    """Case 10: every way in which one rank's sequence of collectives can differ."""
    first, second = group(4, policy=policy)
    wrong = {
        "owner": changed(second, "broadcast[1]", owner=1),
        "bytes": changed(second, "broadcast[1]", bytes=33),
        "fewer": forward(3, rank=1, policy=policy),
        "none": forward(4, rank=1, policy=policy, history=False),
        "layout": replace(second, layout_hash="other"),
        "ranks": replace(second, ranks=3),
        "twice": first,
    }
    assert verify_group([first, second]) == ()
    for name, graph in wrong.items():
        findings = verify_group([first, graph])
        assert "collectives" in rules(findings), name


@BOTH
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_a_rank_that_issues_a_broadcast_behind_the_engines_collectives_is_rejected(policy, chunks):
    """The broadcasts are equal and each rank is sound: only between the groups does the order differ."""
    first, second = group(4, policy=policy, chunks=chunks)
    other = Policy.ON_RELEASE if policy is Policy.ON_ACQUIRE else Policy.ON_ACQUIRE
    late = replace(forward(4, rank=1, policy=other, chunks=chunks), policy=policy)
    assert verify(late) == ()
    assert [n.id for n in late.broadcasts] == [n.id for n in second.broadcasts]
    assert verify_group([first, second]) == ()
    (finding,) = verify_group([first, late])
    assert (finding.rule, finding.rank) == ("collectives", 1)
    assert {"prologue", "attend[0]"} & set(finding.nodes)
    assert "(collectives of engine)" in finding.message


def test_broadcasts_of_other_groups_swapped_on_one_rank_are_rejected_and_on_all_are_not():
    """A host that gives a tensor-parallel and an expert-parallel group their work in another order."""
    lines = ["tp kind=compute collectives=tp", "ep kind=compute stream=side collectives=ep"]
    first, same, other = (
        _text(*order, rank=rank, ranks=2) for rank, order in ((0, lines), (1, lines), (1, lines[::-1]))
    )
    assert verify_group([first, same]) == ()
    assert fault_of([[first], [same]]) is None
    assert rules(verify_group([first, other])) == {"collectives"}
    assert fault_of([[first], [other]]) == "deadlock"
    again = replace(other, rank=0)
    assert verify_group([again, other]) == ()


def test_a_collective_that_waits_for_one_issued_later_is_rejected():
    """Two streams could run it; a device that runs collectives one after another could not."""
    lines = [
        "send kind=broadcast stream=transfer after there",
        "tp collectives=tp",
        "there kind=ready",
        "end after send",
    ]
    graph = _text(*lines)
    (finding,) = verify_alone(graph)
    assert finding.rule == "collectives"
    assert "tp" in finding.nodes
    assert "send" in finding.nodes
    assert "in the order in which the host issues them" in finding.message
    assert fault_of([[graph]]) == "deadlock"
    ready_first = _text(lines[2], lines[0], lines[1], lines[3])
    assert verify_alone(ready_first) == ()
    assert fault_of([[ready_first]]) is None


def test_a_dump_without_groups_is_told_apart_from_one_with():
    """One of version 1: nothing says what its compute nodes issue, so it is not compared silently."""
    first, second = group(3)
    nodes = tuple(replace(n, collectives=()) for n in second.nodes)
    assert rules(verify_group([first, replace(second, nodes=nodes)])) == {"collectives"}


def _with_transfers_exchanged(graph: Graph) -> Graph:
    """The first two transfers in the other order, correctly fenced."""
    graph = changed(graph, "broadcast[1]", after=("ready[1]",))
    graph = changed(graph, "broadcast[0]", after=("ready[0]", "broadcast[1]"))
    transfers = [n for n in graph.nodes if n.layer == 1 and n.kind is not Kind.COMPUTE]
    rest = [n for n in graph.nodes if n not in transfers]
    return replace(graph, nodes=(*transfers, *rest))


def test_transfers_exchanged_on_one_rank_are_rejected_and_on_all_are_not():
    """Case 10."""
    first, second = group(4, policy=Policy.ON_RELEASE)
    exchanged = [_with_transfers_exchanged(graph) for graph in (first, second)]
    assert verify(exchanged[1]) == ()
    assert verify_group(exchanged) == ()
    (finding,) = verify_group([first, exchanged[1]])
    assert (finding.rule, finding.nodes) == ("collectives", ("broadcast[0]", "broadcast[1]"))
    assert "ranks 0 and 1" in finding.message
    assert fault_of([[first], [exchanged[1]]]).startswith("collectives")


def test_the_findings_of_each_rank_are_among_those_of_the_group():
    first, second = group(3)
    broken = without_edge(second, "completion[2]", "attend[2]")
    findings = verify_group([first, broken])
    assert {f.rank for f in findings} == {1}
    assert set(verify(broken)) <= set(findings)
    assert verify_group([]) == ()


def test_ensure_sound_raises_with_all_findings():
    graph = forward(3)
    ensure_sound([graph])
    broken = without_edge(graph, "completion[2]", "attend[2]")
    with pytest.raises(UnsoundGraphError) as caught:
        ensure_sound([broken])
    assert caught.value.findings == verify(broken)
    assert caught.value.findings[0].message in str(caught.value)
    assert f"{len(caught.value.findings) - 1} more" in str(caught.value)


def test_ensure_sound_tries_every_order_of_the_kinds_of_forward():
    """`early` writes on a stream of its own before anything; only after the other is that a race."""
    reader, early = _text("a reads=x"), _text("b stream=side writes=x", "c after b")
    ensure_sound([reader])
    with pytest.raises(UnsoundGraphError, match="next forward"):
        ensure_sound([reader, early])


def test_what_was_compiled_for_one_rank_has_edges_that_matter():
    graph = forward(3)
    broken = [edge for edge in edges(graph) if verify(without_edge(graph, *edge))]
    assert ("completion[0]", "attend[0]") in broken
    assert ("broadcast[0]", "broadcast[1]") not in broken

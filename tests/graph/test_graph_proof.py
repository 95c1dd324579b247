"""`verify` rejects every mutant that some execution breaks, and no other; and would be caught if it did not."""

import sys
from dataclasses import replace

import pytest

from kvpp_dag.graph import Graph, Kind, Node, Policy, order, verify, verify_group
from tests.builders import forward, group
from tests.graph.mutants import in_other_places, renamed, slot_changes, transfer_swaps, transfers
from tests.graph.proof import LARGE, SMALL, TINY, prove
from tests.graph.proof_counts import table

RULES = sys.modules["kvpp_dag.graph.verify"]


def check(tally):
    print(table(tally))
    wrong = [(name, *count.examples) for name, count in tally.counts.items() if count.disagreements]
    assert not wrong, "\n".join(map(str, wrong[0]))
    assert len(tally.counts) == 23
    for name, count in tally.counts.items():
        assert count.mutants >= 10, name
        assert count.rejected == count.unsafe > 0, name
        assert count.accepted == count.safe > 0, name


def test_every_mutant_is_rejected_exactly_if_some_execution_breaks_it():
    check(prove(SMALL))


@pytest.mark.matrix
@pytest.mark.timeout(7200)
def test_every_mutant_of_larger_graphs():
    check(prove(LARGE, seed=1))


def no_findings(*_):
    return iter(())


def without_deadlocks(graphs, order=None, everything=RULES._findings):
    return tuple(f for f in everything(graphs, order) if f.rule != "deadlock")


def races_within_a_forward(forwards, order, races=RULES._races):
    return (f for f in races(forwards, order) if "of the next forward" not in f.message)


def races_between_writers(forwards, order, races=RULES._races):
    writes = {n.id for n in forwards.nodes if n.writes}
    return (f for f in races(forwards, order) if writes.issuperset(f.nodes))


def content_of_any_forward(forwards, buffer, j, last, problem=RULES._content_problem):
    found = problem(forwards, buffer, j, last)
    stale = ("one forward earlier", "nothing wrote before")
    return None if found and any(words in found for words in stale) else found


def content_of_any_layer(forwards, buffer, j, last, problem=RULES._content_problem):
    found = problem(forwards, buffer, j, last)
    return None if found and "wrote it last" in found else found


def content_of_any_piece(forwards, buffer, j, last, problem=RULES._content_problem):
    found = problem(forwards, buffer, j, last)
    return None if found and "another piece" in found else found


def broadcasts_only(graphs, differences=RULES.collective_order):
    kept = [
        replace(g, nodes=tuple(replace(n, collectives=()) for n in g.nodes))
        if isinstance(g, Graph)
        else g
        for g in graphs
    ]
    return differences(kept)


def edges_only(forwards):
    """No stream order: rejects what is safe."""
    result = []
    for graph in forwards:
        base = len(result)
        result += [[base + graph.position[name] for name in n.after] for n in graph.nodes]
    return result


SABOTAGED = {
    "no deadlocks": (RULES, "_findings", without_deadlocks),
    "no races": (RULES, "_races", no_findings),
    "no races across the wrap": (RULES, "_races", races_within_a_forward),
    "no races with readers": (RULES, "_races", races_between_writers),
    "no content": (RULES, "_contents", no_findings),
    "content of any forward": (RULES, "_content_problem", content_of_any_forward),
    "content of any layer": (RULES, "_content_problem", content_of_any_layer),
    "content of any piece": (RULES, "_content_problem", content_of_any_piece),
    "no waiters": (RULES, "_unjoined", no_findings),
    "no order of collectives on a rank": (RULES, "_unordered_collectives", no_findings),
    "no order of collectives between ranks": (RULES, "collective_order", no_findings),
    "no order of the engine's collectives between ranks": (RULES, "collective_order", broadcasts_only),
    "collectives of a device at any time": (RULES, "_overtaken_collectives", no_findings),
    "contradictions allowed": (RULES, "_misdescribed", no_findings),
    "no stream order": (order, "direct_predecessors", edges_only),
}


@pytest.mark.parametrize("rule", SABOTAGED)
def test_a_verifier_that_lacks_a_rule_disagrees_with_the_judge(rule, monkeypatch):
    """The control: were one rule wrong, the test above would fail."""
    monkeypatch.setattr(*SABOTAGED[rule])
    counts = prove(TINY).counts.values()
    assert sum(count.disagreements for count in counts) > 0
    too_strict = rule == "no stream order"
    assert any(count.rejected > count.unsafe for count in counts) == too_strict
    assert any(count.rejected < count.unsafe for count in counts) != too_strict


@pytest.mark.parametrize("policy", Policy)
def test_a_piece_that_is_unpacked_from_the_half_of_another_is_rejected(policy):
    graph = forward(1, rank=1, policy=policy, chunks=2)
    nodes = [replace(n, reads=("staging[0]",)) if n.id == "unpack.1[0]" else n for n in graph.nodes]
    findings = verify(replace(graph, nodes=tuple(nodes)))
    assert {finding.nodes for finding in findings} == {("broadcast.0[0]", "unpack.1[0]")}
    assert "broadcast.0[0], which wrote it last, carries another piece" in findings[0].message
    assert verify(graph) == ()


@pytest.mark.parametrize("policy", Policy)
def test_transfers_that_only_carry_each_others_names_are_rejected(policy):
    """All of one size and of one owner, so that nothing but the layer tells them apart."""
    first, second = group(3, policy=policy, num_blocks=0)
    other = {"broadcast[0]": "broadcast[1]", "broadcast[1]": "broadcast[0]"}
    other |= {"ready[0]": "ready[1]", "ready[1]": "ready[0]"}
    other |= {"completion[0]": "completion[1]", "completion[1]": "completion[0]"}
    swapped = in_other_places(first, other)
    names = {name: other[name] for name in ("broadcast[0]", "broadcast[1]")}
    mutant = renamed(swapped, names)
    assert verify(mutant) == ()
    (finding,) = verify_group([mutant, second])
    assert finding.rule == "collectives"
    assert "broadcast[0] (layer 1, owner 0, 0 bytes)" in finding.message


def staged():
    """A layer that is packed, sent and unpacked by nodes of no kind that is known here."""
    common = {"kind": Kind.COMPUTE, "layer": 0, "stream": "transfer"}
    send = Node(
        id="send", reads=("staging[0]",), writes=("staging[1]",), **common | {"kind": Kind.BROADCAST}
    )
    return Graph(
        nodes=(
            Node(id="pack", reads=("persistent[0]",), writes=("staging[0]",), **common),
            send,
            Node(id="unpack", reads=("staging[1]",), writes=("scratch[0]",), **common),
            Node(
                id="attend", reads=("scratch[0]",), after=("unpack",), **common | {"stream": "compute"}
            ),
        )
    )


def test_nodes_that_pack_and_unpack_are_mutated_as_transfers_are():
    graph = staged()
    assert [n.id for n in transfers(graph)] == ["pack", "send", "unpack"]
    swaps = [[n.id for n in mutant.nodes] for mutant in transfer_swaps(graph)]
    assert ["unpack", "send", "pack", "attend"] in swaps
    touched = {(n.id, n.reads, n.writes) for mutant in slot_changes(graph) for n in mutant.nodes}
    assert ("pack", ("persistent[0]",), ("staging[1]",)) in touched
    assert ("unpack", ("staging[0]",), ("scratch[0]",)) in touched
    assert ("attend", ("staging[0]",), ()) in touched

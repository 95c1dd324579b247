"""`verify_sequences` must find fault exactly where `verify` does with some graph and some following one."""

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpp_dag.errors import UnsoundGraphError
from kvpp_dag.graph import (
    Graph,
    Kind,
    Node,
    Policy,
    ensure_sound,
    sequence,
    verify,
    verify_alone,
    verify_sequences,
)
from tests.builders import compute, forward
from tests.graph.mutants import edge_removals, slot_changes, transfer_swaps


def pairwise_faults(graphs):
    """What `verify_sequences` stands for: every graph followed by every graph."""
    return [finding for first, then in product(graphs, graphs) for finding in verify(first, then)]


def agree(graphs) -> bool:
    """Compare the two; whether they object."""
    found = verify_sequences(graphs)
    assert bool(found) == bool(pairwise_faults(graphs)), graphs
    return bool(found)


def kinds(layers, *, ranks=2, chunks=(1, 2), **settings):
    """Every kind of forward of one rank."""
    counts = (0, *chunks)
    graphs = [forward(layers, ranks, chunks=count, **settings) for count in counts]
    return [*graphs, forward(layers, ranks, history=False, **settings)]


@pytest.mark.parametrize(("policy", "depth"), list(product(Policy, (1, 2, 3))))
def test_compiled_forwards_may_follow_each_other_in_any_order(policy, depth):
    for layers, ranks, rank in [(0, 2, 0), (1, 2, 1), (3, 2, 0), (5, 3, 1), (5, 3, 2), (4, 1, 0)]:
        graphs = kinds(layers, ranks=ranks, rank=rank, policy=policy, depth=depth)
        assert not agree(graphs)
        ensure_sound(graphs)


def with_exchanged_buffers(graph: Graph, a: str, b: str) -> Graph:
    """`graph` that keeps in one buffer what others keep in the other: sound by itself."""
    other = {a: b, b: a}

    def renamed(buffers):
        return tuple(other.get(name, name) for name in buffers)

    nodes = (replace(n, reads=renamed(n.reads), writes=renamed(n.writes)) for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


@pytest.mark.parametrize("chunks", [0, 1, 2])
@pytest.mark.parametrize("policy", Policy)
def test_forwards_that_keep_layers_in_different_buffers_must_not_follow_each_other(policy, chunks):
    graph = forward(4, 2, policy=policy, chunks=chunks)
    other = with_exchanged_buffers(graph, "persistent[0]", "persistent[1]")
    assert other != graph
    for alone in (graph, other):
        assert not agree([alone])
    assert agree([graph, other])
    finding = verify_sequences([graph, other])[0]
    assert finding.rule == "content"
    assert "of the next forward reads persistent[" in finding.message
    with pytest.raises(UnsoundGraphError, match=r"wrong content .*\(\d+ more findings\)"):
        ensure_sound([graph, other])


@cache
def mutants() -> list[Graph]:
    """Compiled forwards broken in one way, those that are not, and some that are broken between forwards only."""
    rng, found = random.Random(5), []
    for policy, chunks, rank in product(Policy, (0, 1, 2), (0, 1)):
        graph = forward(3, 2, rank=rank, policy=policy, chunks=chunks)
        broken = [*edge_removals(graph), *transfer_swaps(graph), *slot_changes(graph)]
        owned = [f"persistent[{i}]" for i in range(3)]
        found += rng.sample(broken, min(len(broken), 40))
        found += [graph, forward(3, 2, rank=rank, policy=policy, history=False)]
        found += [with_exchanged_buffers(graph, owned[0], owned[2])]
    return found


def test_every_mutant_by_itself_and_beside_what_it_came_from():
    verdicts = {True: 0, False: 0}
    for graph in mutants():
        verdicts[agree([graph])] += 1
    assert min(verdicts.values()) > 50


@given(st.lists(st.sampled_from(mutants()), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_mutants_in_any_company(graphs):
    agree(graphs)


def sound_alone() -> list[Graph]:
    return [graph for graph in mutants() if not verify_alone(graph)]


def test_mutants_that_are_sound_alone_in_pairs():
    """These get past the first look, so that the border between forwards decides."""
    rng, graphs = random.Random(6), sound_alone()
    verdicts = {True: 0, False: 0}
    for _ in range(400):
        verdicts[agree([rng.choice(graphs) for _ in range(2)])] += 1
    assert min(verdicts.values()) > 30


def unfenced(rng: random.Random) -> Graph:
    """A small graph that may still run when the next begins, or begin before the last is over."""
    streams, buffers = ("compute", "side"), ("x", "scratch[0]")
    nodes = [
        Node(
            id=f"n{i}",
            kind=Kind.COMPUTE,
            stream=rng.choice(streams),
            after=tuple(f"n{j}" for j in range(i) if rng.random() < 0.5),
            reads=tuple(b for b in buffers if rng.random() < 0.15),
            writes=tuple(b for b in buffers if rng.random() < 0.25),
            layer=rng.choice((None, 0, 1)),
        )
        for i in range(rng.randint(1, 5))
    ]
    return Graph(nodes=tuple(nodes))


@pytest.mark.parametrize("seed", range(3))
def test_graphs_without_fences(seed):
    rng = random.Random(seed)
    graphs = [graph for graph in (unfenced(rng) for _ in range(400)) if not verify_alone(graph)]
    verdicts = {True: 0, False: 0}
    for _ in range(400):
        verdicts[agree([rng.choice(graphs) for _ in range(2)])] += 1
    assert min(verdicts.values()) > 30


def test_what_no_fence_closes_is_looked_at_as_a_whole():
    """A side stream that nothing on the compute stream waits for goes on writing in the next forward."""
    late = Graph(
        nodes=(
            compute("prologue"),
            compute("late", stream="side", after=("prologue",), writes=("x",)),
        )
    )
    early = Graph(nodes=(compute("prologue", writes=("x",)),))
    assert not agree([late])
    assert agree([late, early])
    assert verify_sequences([late, early])[0].rule == "race"


def disagreements(graph_pairs) -> int:
    return sum(bool(verify_sequences(pair)) != bool(pairwise_faults(pair)) for pair in graph_pairs)


def test_controls_a_proof_without_its_parts_disagrees(monkeypatch):
    graph = forward(3, 2)
    other = with_exchanged_buffers(graph, "persistent[0]", "persistent[1]")
    rng = random.Random(1)
    loose = [g for g in (unfenced(rng) for _ in range(200)) if not verify_alone(g)]
    pairs = [(graph, other), *((rng.choice(loose), rng.choice(loose)) for _ in range(200))]
    assert disagreements(pairs) == 0
    with monkeypatch.context() as patch:
        patch.setattr(sequence, "_stale", lambda first, then: iter(()))
        assert disagreements(pairs[:1]) == 1
    with monkeypatch.context() as patch:
        patch.setattr(sequence, "_encloses", lambda order, first, last: True)
        assert disagreements(pairs) > 10

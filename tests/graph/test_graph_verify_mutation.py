"""Graphs broken at random, several times over, or too large to search: `verify` must object exactly if it must.

Every single mutant of small graphs is in `proof.py`.
"""

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from kvpp_dag.graph import Graph, Kind, Node, Policy, to_text, verify, without_edge
from tests.builders import changed, edges, forward, group, swapped
from tests.judge import fault_by_closure, fault_of

SEEDS = range(4)


class Tally:
    """Counts verdicts, and checks in the end that there were some of each."""

    def __init__(self) -> None:
        self.counts = Counter()

    def compare(self, fault: str | None, findings: tuple, graph: Graph) -> None:
        assert bool(findings) == bool(fault), (fault, findings, to_text(graph))
        self.counts[fault.split(":")[0] if fault else "accepted"] += 1

    def check(self, *faults: str, least: int = 1) -> None:
        for name in ("accepted", *faults):
            assert self.counts[name] >= least, self.counts


def _compiled(layers, depths, sizes):
    for policy, n, depth, ranks in product(Policy, layers, depths, sizes):
        yield from group(n, ranks, policy=policy, depth=depth)


@pytest.mark.parametrize(("layers", "ranks", "depth"), [(8, 9, 1), (7, 3, 2), (8, 3, 3)])
@pytest.mark.parametrize("policy", Policy)
def test_every_edge_of_larger_forwards(policy, layers, ranks, depth):
    tally = Tally()
    for rank in (0, ranks - 1):
        graph = forward(layers, ranks, rank=rank, policy=policy, depth=depth)
        for edge in edges(graph):
            broken = without_edge(graph, *edge)
            tally.compare(fault_by_closure(broken), verify(broken), broken)
    tally.check("race", least=5)


def test_every_two_nodes_exchanged():
    tally = Tally()
    for graph in _compiled((2, 3), (1, 2), (2,)):
        for i in range(len(graph.nodes)):
            for j in range(i):
                other = swapped(graph, i, j)
                tally.compare(fault_of([[other, other]]), verify(other), other)
    tally.check("deadlock", least=100)


def _broken_at_random(rng: random.Random, graph: Graph) -> Graph:
    """A few mutations at once: edges taken or added, nodes moved in the list or to another stream."""
    for _ in range(rng.randint(1, 4)):
        node = rng.choice(graph.nodes)
        match rng.randrange(5):
            case 0 | 1:
                if node.after:
                    graph = without_edge(graph, rng.choice(node.after), node.id)
            case 2:
                other = rng.choice([n.id for n in graph.nodes if n.id != node.id])
                graph = changed(graph, node.id, after=(*node.after, other))
            case 3:
                nodes = [n for n in graph.nodes if n.id != node.id]
                nodes.insert(rng.randrange(len(graph.nodes)), node)
                graph = replace(graph, nodes=tuple(nodes))
            case 4:
                graph = changed(graph, node.id, stream=rng.choice(["compute", "transfer", "side"]))
    return graph


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_forwards_with_several_random_mutations(seed):
    rng, tally = random.Random(seed), Tally()
    graphs = list(_compiled((2, 3), (1, 2), (2,)))
    for _ in range(250):
        broken = _broken_at_random(rng, rng.choice(graphs))
        tally.compare(fault_of([[broken, broken]]), verify(broken), broken)
    tally.check("race", "deadlock")


def _random_graph(
    rng: random.Random, *, broadcasts: float = 0.25, layers: tuple = (None, None, 0, 0, 0, 1)
) -> Graph:
    ids = [f"n{i}" for i in range(rng.randint(2, 7))]
    streams = ["s0", "s1", "s2"][: rng.randint(1, 3)]
    buffers = ["x", "scratch[0]", "scratch[1]"]
    nodes = [
        Node(
            id=node_id,
            kind=Kind.BROADCAST if rng.random() < broadcasts else Kind.COMPUTE,
            stream=rng.choice(streams),
            after=tuple(
                other
                for j, other in enumerate(ids)
                if j != i and rng.random() < (0.5 if j < i else 0.02)
            ),
            reads=tuple(b for b in buffers if rng.random() < 0.12),
            writes=tuple(b for b in buffers if rng.random() < 0.2),
            layer=rng.choice(layers),
        )
        for i, node_id in enumerate(ids)
    ]
    return Graph(nodes=tuple(nodes))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs(seed):
    rng, tally = random.Random(seed), Tally()
    for _ in range(500):
        graph = _random_graph(rng)
        tally.compare(fault_of([[graph, graph]]), verify(graph), graph)
    tally.check("race", "content", "deadlock", "unjoined", "collectives")


@pytest.mark.parametrize("seed", SEEDS)
def test_two_different_random_forwards_in_a_row(seed):
    rng, tally = random.Random(100 + seed), Tally()
    for _ in range(300):
        first, then = (_random_graph(rng, broadcasts=0.05, layers=(None,)) for _ in range(2))
        if any(fault_of([[graph]]) for graph in (first, then)):
            continue
        tally.compare(fault_of([[first, then]]), verify(first, then), first)
    tally.check("race", least=10)

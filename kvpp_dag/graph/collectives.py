"""Whether the hosts of all ranks issue the collectives of all groups in one order."""

from collections.abc import Iterator, Sequence

from kvpp_dag.graph.finding import Finding
from kvpp_dag.graph.nodes import KVPP_GROUP, Collectives, Graph, Node


def collective_order(graphs: Sequence[Graph | Collectives]) -> Iterator[Finding]:
    """Differences between the sequences of collectives of all groups, which would deadlock or corrupt."""
    if not graphs:
        return
    first = graphs[0]
    expected = list(map(_meaning, first.issued))
    seen = {first.rank}
    for graph in graphs[1:]:
        problem, nodes = _difference(first, expected, graph, seen)
        seen.add(graph.rank)
        if problem:
            yield Finding(
                rule="collectives",
                rank=graph.rank,
                nodes=nodes,
                message=f"collective order of ranks {first.rank} and {graph.rank}: {problem}.",
            )


_Meaning = tuple[str, int | None, int | None, int, tuple[str, ...]]
"""What must be equal on all ranks: id, layer, owner, bytes and groups of a node that issues collectives."""


def _meaning(node: Node) -> _Meaning:
    return node.id, node.layer, node.owner, node.bytes, node.groups


def _described(meaning: _Meaning) -> str:
    name, layer, owner, nbytes, groups = meaning
    if groups != (KVPP_GROUP,):
        return f"{name} (collectives of {', '.join(groups)})"
    return f"{name} (layer {layer}, owner {owner}, {nbytes} bytes)"


def _difference(
    first: Graph | Collectives,
    expected: list[_Meaning],
    graph: Graph | Collectives,
    seen: set[int],
) -> tuple[str | None, tuple[str, ...]]:
    if graph.rank in seen:
        return f"rank {graph.rank} was given twice", ()
    if graph.ranks != first.ranks or graph.layout_hash != first.layout_hash:
        return (
            f"they were planned differently ({first.ranks} ranks, layout {first.layout_hash}, "
            f"against {graph.ranks} ranks, layout {graph.layout_hash})"
        ), ()
    actual = list(map(_meaning, graph.issued))
    for place, (left, right) in enumerate(zip(expected, actual, strict=False)):
        if left != right:
            return (
                f"at place {place} one issues {_described(left)} and the other {_described(right)}"
            ), (left[0], right[0])
    if len(expected) != len(actual):
        return f"one issues {len(expected)} collectives and the other {len(actual)}", ()
    return None, ()

"""Every mutant of a graph: an edge taken away, two transfers exchanged, a slot or a buffer changed.

A transfer is a broadcast, a copy, or whatever else touches buffers on a stream that carries broadcasts, so
nodes that pack or unpack are exchanged and moved as well.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from kvpp_dag.graph import Graph, Kind, Node, without_edge
from tests.builders import changed, edges

EVENTS = (Kind.READY, Kind.COMPLETION)
_POOLED = re.compile(r"(scratch|staging)\[(\d+)\]")
_CARRIED = ("reads", "writes", "layer", "owner", "slot", "bytes")


def edge_removals(graph: Graph) -> Iterator[Graph]:
    for edge in edges(graph):
        yield without_edge(graph, *edge)


def transfers(graph: Graph) -> list[Node]:
    streams = {node.stream for node in graph.broadcasts}
    return [
        n
        for n in graph.nodes
        if n.kind in (Kind.BROADCAST, Kind.COPY) or (n.stream in streams and (n.reads or n.writes))
    ]


def transfer_swaps(graph: Graph) -> Iterator[Graph]:
    """Two transfers exchanged: their places, with or without their events and names, or what they carry.

    What they carry only if they are of one kind: a copy does not carry what a broadcast does.
    """
    for a, b in combinations(transfers(graph), 2):
        yield in_other_places(graph, {a.id: b.id, b.id: a.id})
        whole = in_other_places(graph, _with_events(graph, a, b))
        yield whole
        yield renamed(whole, {a.id: b.id, b.id: a.id})
        for fields in (_CARRIED, ("reads", "writes"), ("slot", "writes")) if a.kind is b.kind else ():
            yield exchanged(graph, a, b, fields)


def places_changed(graph: Graph) -> Iterator[Graph]:
    """Every node issued earlier or later, as far as its stream's order stays what it is."""
    for place, node in enumerate(graph.nodes):
        others = (*graph.nodes[:place], *graph.nodes[place + 1 :])
        mates = [i for i, other in enumerate(others) if other.stream == node.stream]
        first = max((i + 1 for i in mates if i < place), default=0)
        last = min((i for i in mates if i >= place), default=len(others))
        for i in range(first, last + 1):
            yield replace(graph, nodes=(*others[:i], node, *others[i:]))


def owner_swaps(graph: Graph) -> Iterator[tuple[Graph, Graph]]:
    """The owners of two broadcasts exchanged: only the names, and with all that follows from them."""
    for a, b in combinations(graph.broadcasts, 2):
        yield exchanged(graph, a, b, ("owner",)), with_owner(with_owner(graph, a, b.owner), b, a.owner)


def exchanged(graph: Graph, a: Node, b: Node, fields: tuple[str, ...]) -> Graph:
    """`graph` in which two nodes have each other's values of some fields."""
    graph = changed(graph, a.id, **{field: getattr(b, field) for field in fields})
    return changed(graph, b.id, **{field: getattr(a, field) for field in fields})


def in_other_places(graph: Graph, other: dict[str, str]) -> Graph:
    """`graph` in which nodes stand where `other` says; edges between transfers follow the new order."""
    chain = {n.id for n in transfers(graph)}
    nodes = []
    for place in graph.nodes:
        node = graph[other.get(place.id, place.id)]
        own = [name for name in node.after if name not in chain or node.id not in chain]
        linked = [other.get(name, name) for name in place.after if name in chain and place.id in chain]
        nodes.append(replace(node, after=(*own, *(name for name in linked if name != node.id))))
    return replace(graph, nodes=tuple(nodes))


def renamed(graph: Graph, names: dict[str, str]) -> Graph:
    """`graph` with other names for some nodes."""
    nodes = (
        replace(n, id=names.get(n.id, n.id), after=tuple(names.get(name, name) for name in n.after))
        for n in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _with_events(graph: Graph, a: Node, b: Node) -> dict[str, str]:
    """Which node takes whose place if the events of both transfers move with them."""
    result = {a.id: b.id, b.id: a.id}
    for kind in EVENTS:
        pair = [[n.id for n in graph.nodes if n.kind is kind and n.layer == t.layer] for t in (a, b)]
        if len(pair[0]) == len(pair[1]) == 1 and pair[0] != pair[1]:
            (first,), (second,) = pair
            result |= {first: second, second: first}
    return result


def slot_changes(graph: Graph) -> Iterator[Graph]:
    """Every access to a slot moved to every other slot, alone or with the rest of its layer.

    Readers are moved to every other buffer of the graph as well.
    """
    buffers = dict.fromkeys(b for n in graph.nodes for b in (*n.reads, *n.writes))
    pooled = [b for b in buffers if _POOLED.fullmatch(b)]
    pooled += [f"scratch[{i}]" for i in range(graph.depth + 1) if f"scratch[{i}]" not in buffers]
    moving = transfers(graph)
    for node in graph.nodes:
        for old in dict.fromkeys((*node.reads, *node.writes)):
            for new in dict.fromkeys((*pooled, *(buffers if node not in moving else ()))):
                if new != old and (old in pooled or node not in moving):
                    yield from _moved(graph, node, old, new)
    for layer in {n.layer for n in graph.nodes} - {None}:
        for old in pooled:
            for new in pooled:
                yield _layer_moved(graph, layer, old, new)


def _moved(graph: Graph, node: Node, old: str, new: str) -> Iterator[Graph]:
    reads, writes = _renamed(node.reads, old, new), _renamed(node.writes, old, new)
    slot = _POOLED.fullmatch(new)
    labelled = node.slot is not None and slot is not None
    number = {"slot": int(slot[2])} if labelled else {}
    yield changed(graph, node.id, reads=reads, writes=writes, **number)
    yield changed(graph, node.id, reads=reads)
    yield changed(graph, node.id, writes=writes)
    if labelled:
        yield changed(graph, node.id, **number)


def _layer_moved(graph: Graph, layer: int, old: str, new: str) -> Graph:
    """A layer and its transfer, together, in another slot: wrong only where that slot is taken."""
    for node in graph.nodes:
        if node.layer == layer and old in (*node.reads, *node.writes):
            graph = next(_moved(graph, graph[node.id], old, new))
    return graph


def _renamed(names: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(new if name == old else name for name in names))


def with_owner(graph: Graph, broadcast: Node, owner: int | None) -> Graph:
    """`graph` as it must be if another rank owned a layer: the buffers of all its nodes follow."""
    was, now = broadcast.owner == graph.rank, owner == graph.rank
    kept, slot = f"persistent[{broadcast.layer}]", f"scratch[{broadcast.slot}]"
    graph = changed(graph, broadcast.id, owner=owner)
    if was == now:
        return graph
    old, new = (kept, slot) if was else (slot, kept)
    for node in graph.nodes:
        if node.layer == broadcast.layer and old in (*node.reads, *node.writes):
            reads, writes = _renamed(node.reads, old, new), _renamed(node.writes, old, new)
            if node.kind is Kind.BROADCAST:  # who sent now receives, and the other way round
                reads, writes = writes, reads
            graph = changed(graph, node.id, reads=reads, writes=writes)
    return graph

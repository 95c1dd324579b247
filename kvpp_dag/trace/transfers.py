"""The transfers of a recorded forward: when each ran, and what each had to wait for before it could start.

A transfer is what a layer puts on the transfer stream, from the start of its first node to the end of its
last; its events are no part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpp_dag.graph import TRANSFER_STREAM, Graph, Kind, Node
from kvpp_dag.graph.nodes import EVENTS
from kvpp_dag.trace.critical import end_of
from kvpp_dag.trace.records import ForwardRecord


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A transfer could not start before `time`; `node` is what ended then, None for the forward's begin."""

    time: int
    node: str | None


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The transfer of one layer on one rank; times in nanoseconds of the recording's clock.

    `node` is its first broadcast. `hook` is when the host had handed it over and its ready event was reached,
    `slot_free` the end of the slot's last reader, `link_free` the end of the transfer before it.
    `skew` is time in its broadcasts before the last rank had joined, which was `late_rank`.
    """

    layer: int
    node: str
    owner: int | None
    slot: int | None
    bytes: int
    start: int
    end: int
    hook: int
    slot_free: Gate
    link_free: Gate
    skew: int
    late_rank: int | None

    @property
    def own(self) -> int:
        """What the transfer takes once all ranks have joined it."""
        return self.end - self.start - self.skew

    @property
    def first(self) -> bool:
        """Whether nothing of its forward had to end before it could start."""
        return self.slot_free.node is None and self.link_free.node is None


def transfers(record: ForwardRecord, peers: Mapping[int, ForwardRecord]) -> dict[int, Transfer]:
    """The finished transfers of `record` by layer, in issue order.

    `peers` are the records of the same forward on other ranks, by rank, whose times can be compared.
    """
    result: dict[int, Transfer] = {}
    # What had started when a forward failed lasts until its end.
    over = end_of(record) if record.error is not None or not record.ended else None
    link = Gate(time=record.began, node=None)
    for layer, nodes in transfer_nodes(record.graph).items():
        if any(node.id not in record.spans for node in nodes):
            continue
        broadcast = next((node for node in nodes if node.kind is Kind.BROADCAST), nodes[0])
        spans = [record.spans[node.id] for node in nodes]
        start, end = min(s.start for s in spans), max(s.end for s in spans)
        if over is not None and end >= over:
            continue
        skew, late_rank = _skew(record, nodes, peers)
        result[layer] = Transfer(
            layer=layer,
            node=broadcast.id,
            owner=broadcast.owner,
            slot=broadcast.slot,
            bytes=sum(node.bytes for node in nodes if node.kind is Kind.BROADCAST),
            start=start,
            end=max(start, end),
            hook=_hook(record, nodes),
            slot_free=_slot_free(record, nodes),
            link_free=link,
            skew=skew,
            late_rank=late_rank,
        )
        link = Gate(time=max(link.time, end), node=broadcast.id)
    return result


def transfer_nodes(graph: Graph) -> dict[int, list[Node]]:
    """The nodes of each layer's transfer, by layer, in issue order."""
    result: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if node.stream == TRANSFER_STREAM and node.kind not in EVENTS and node.layer is not None:
            result.setdefault(node.layer, []).append(node)
    return result


def _hook(record: ForwardRecord, nodes: Sequence[Node]) -> int:
    """When the host had handed a transfer over and the ready events of its first node were reached."""
    handed = [record.submitted[node.id] for node in nodes if node.id in record.submitted]
    ready = _ready(record.graph, nodes[0])
    return max([record.began, *handed[:1], *(record.spans[e].end for e in ready if e in record.spans)])


def _slot_free(record: ForwardRecord, nodes: Sequence[Node]) -> Gate:
    """The end of the last compute node that the ready events of a transfer come after."""
    gate = Gate(time=record.began, node=None)
    graph = record.graph
    for event in (name for node in nodes for name in _ready(graph, node)):
        for name in graph[event].after:
            if graph[name].kind is Kind.COMPUTE and name in record.spans:
                gate = max(gate, Gate(time=record.spans[name].end, node=name), key=lambda g: g.time)
    return gate


def _ready(graph: Graph, node: Node) -> list[str]:
    return [name for name in node.after if graph[name].kind is Kind.READY]


def _skew(
    record: ForwardRecord, nodes: Sequence[Node], peers: Mapping[int, ForwardRecord]
) -> tuple[int, int | None]:
    """Time in the broadcasts of a transfer before the last rank had joined, and the rank that cost most.

    A rank that joined when this one's broadcast had ended already did not hold it up.
    """
    total = longest = 0
    late_rank = None
    for node in nodes:
        if node.kind is not Kind.BROADCAST:
            continue
        own = record.spans[node.id]
        joined = {r: peer.spans[node.id].start for r, peer in peers.items() if node.id in peer.spans}
        waited = {r: start - own.start for r, start in joined.items() if own.start < start <= own.end}
        if waited:
            rank = max(waited, key=waited.__getitem__)
            total += waited[rank]
            if waited[rank] > longest:
                longest, late_rank = waited[rank], rank
    return total, late_rank

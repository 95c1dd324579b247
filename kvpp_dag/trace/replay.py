"""Bounds: what a recorded forward would have taken, had its transfers or its compute taken no time.

The graph is run again with measured durations: a node starts when everything it comes after has ended,
over edges and on its stream.
"""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from kvpp_dag.errors import GraphError
from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Kind
from kvpp_dag.graph.order import direct_predecessors
from kvpp_dag.trace.critical import end_of
from kvpp_dag.trace.records import ForwardRecord
from kvpp_dag.trace.transfers import Transfer, transfer_nodes


def bounds(record: ForwardRecord, done: Mapping[int, Transfer]) -> tuple[int, int]:
    """Nanoseconds that the forward would take with free transfers, and with free compute.

    With free transfers the host still takes the time that it took between two compute nodes without waiting.
    With free compute it takes none. `done` are the transfers of `record`, of which the time before the last
    rank had joined is left out. Raises GraphError if nodes of the graph wait for each other in a ring.
    """
    compute, tail = _compute(record)
    transfer = _transfer(record, done)
    nodes = record.graph.nodes
    before = direct_predecessors((record.graph,))
    sequence = _sequence(before)
    whole = end_of(record) - record.began
    free_transfers = _length(before, sequence, [compute.get(node.id, 0) for node in nodes]) + tail
    free_compute = _length(before, sequence, [transfer.get(node.id, 0) for node in nodes])
    # The clock of a device may let nodes of one stream overlap a little; no bound is above what was measured.
    return min(whole, free_transfers), min(whole, free_compute)


def _compute(record: ForwardRecord) -> tuple[dict[str, int], int]:
    """What each compute node took, with the host's time before it that was no wait; and that after the last."""
    graph = record.graph
    items = [(span.start, span.end, "") for span in record.waits.values()]
    for name, span in record.spans.items():
        if graph[name].kind is Kind.COMPUTE and graph[name].stream == COMPUTE_STREAM:
            items.append((span.start, span.end, name))
    durations: dict[str, int] = {}
    gap, before = 0, record.began
    for start, end, name in sorted(items):
        gap += max(0, start - before)
        before = max(before, end)
        if name:
            durations[name] = gap + max(0, end - start)
            gap = 0
    return durations, gap + max(0, end_of(record) - before)


def _transfer(record: ForwardRecord, done: Mapping[int, Transfer]) -> dict[str, int]:
    """What each node of the transfer stream took; that of a layer's transfer is put on its first node."""
    graph = record.graph
    durations = {
        name: max(0, span.duration)
        for name, span in record.spans.items()
        if graph[name].stream == TRANSFER_STREAM
    }
    for layer, nodes in transfer_nodes(graph).items():
        if layer in done:
            durations |= {node.id: 0 for node in nodes}
            durations[nodes[0].id] = done[layer].own
    return durations


def _length(before: Sequence[Sequence[int]], sequence: Sequence[int], durations: Sequence[int]) -> int:
    """The end of the last node, if each starts as soon as it may and takes what `durations` says."""
    ends = [0] * len(before)
    for i in sequence:
        ends[i] = durations[i] + max((ends[j] for j in before[i]), default=0)
    return max(ends, default=0)


def _sequence(before: Sequence[Sequence[int]]) -> Sequence[int]:
    """All nodes, each behind those that it comes after."""
    if all(j < i for i, some in enumerate(before) for j in some):
        return range(len(before))
    try:
        return tuple(TopologicalSorter(dict(enumerate(before))).static_order())
    except CycleError as error:
        raise GraphError(
            "The graph of a recorded forward has a cycle, so no run can have taken place."
        ) from error

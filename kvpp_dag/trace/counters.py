"""Counters of a recording over time: payload bytes in flight, and scratch slots in use."""

from collections import defaultdict
from collections.abc import Iterable

from kvpp_dag.graph import TRANSFER_STREAM, Graph, Kind
from kvpp_dag.graph.nodes import SCRATCH
from kvpp_dag.trace.records import ForwardRecord

Steps = list[tuple[int, int]]
"""Times in ascending order, each with the value from then on."""


def bytes_in_flight(forwards: Iterable[ForwardRecord]) -> Steps:
    """Payload bytes of the broadcasts that run at a time."""
    changes = []
    for record in forwards:
        for node in record.graph.broadcasts:
            if node.id in record.spans:
                start, end = record.spans[node.id]
                changes += [(start, node.bytes), (end, -node.bytes)]
    return _add_up(changes)


def slots_busy(forwards: Iterable[ForwardRecord]) -> Steps:
    """Scratch slots of this rank that hold a layer: from the start of its transfer to its last reader's end.

    A layer that nothing read, since its forward failed, holds its slot until the forward ended.
    """
    changes = []
    uses: dict[int, dict[tuple[str, int | None], tuple[list[str], list[str]]]] = {}
    for record in forwards:
        if id(record.graph) not in uses:
            uses[id(record.graph)] = _uses(record.graph)
        for writers, readers in uses[id(record.graph)].values():
            starts = [record.spans[node].start for node in writers if node in record.spans]
            ends = [record.spans[node].end for node in (*writers, *readers) if node in record.spans]
            if starts:
                whole = all(node in record.spans for node in readers)
                changes += [(min(starts), 1), (max(*ends, 0 if whole else record.ended), -1)]
    return _add_up(changes)


def _uses(graph: Graph) -> dict[tuple[str, int | None], tuple[list[str], list[str]]]:
    """By slot and layer: the nodes that fill a slot with a layer, and those that read it there."""
    uses: dict[tuple[str, int | None], tuple[list[str], list[str]]] = {}
    for node in graph.nodes:
        for buffer in node.writes:
            if buffer.startswith(SCRATCH) and node.stream == TRANSFER_STREAM:
                uses.setdefault((buffer, node.layer), ([], []))[0].append(node.id)
        for buffer in node.reads:
            if node.kind is Kind.COMPUTE and (buffer, node.layer) in uses:
                uses[buffer, node.layer][1].append(node.id)
    return uses


def _add_up(changes: Iterable[tuple[int, int]]) -> Steps:
    by_time: dict[int, int] = defaultdict(int)
    for time, change in changes:
        by_time[time] += change
    steps, value = [], 0
    for time, change in sorted(by_time.items()):
        if change:
            value += change
            steps.append((time, value))
    return steps

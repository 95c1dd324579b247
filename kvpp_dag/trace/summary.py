"""What was hidden and what was exposed, in a few figures.

Overlap is defined as in Holistic Trace Analysis: the share of merged communication time during which
compute ran as well.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpp_dag.graph import Kind
from kvpp_dag.trace.records import ForwardRecord

Interval = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures over some forwards of one rank; times in nanoseconds, payload in bytes."""

    forwards: int
    forwards_with_history: int
    broadcasts: int
    bytes: int
    transfer_ns: int
    exposed_ns: int
    overlapped_ns: int

    @property
    def overlap_percent(self) -> float:
        """100 x time in which both transfer and compute ran / transfer time; 0 without transfers."""
        return 100 * self.overlapped_ns / self.transfer_ns if self.transfer_ns else 0.0

    def text(self) -> str:
        """Five lines for a terminal or a log."""
        return (
            f"forwards   {self.forwards}, {self.forwards_with_history} of them with history\n"
            f"broadcasts {self.broadcasts}, {self.bytes / 1e6:.3f} MB\n"
            f"transfer   {self.transfer_ns / 1e6:.3f} ms\n"
            f"exposed    {self.exposed_ns / 1e6:.3f} ms (compute stood waiting for a transfer)\n"
            f"overlap    {self.overlap_percent:.2f} % of the transfer time was beside compute\n"
        )


def summarize(records: Iterable[ForwardRecord]) -> Summary:
    """Add up recorded forwards of one rank."""
    forwards = with_history = broadcasts = nbytes = exposed = 0
    transfers: list[Interval] = []
    computes: list[Interval] = []
    for record in records:
        forwards += 1
        with_history += record.graph.history
        exposed += sum(wait.duration for wait in record.waits.values())
        # A chunk that a forward does not fill is not sent.
        sent = [node for node in record.graph.broadcasts if node.id in record.spans and node.bytes]
        broadcasts += len(sent)
        nbytes += sum(node.bytes for node in sent)
        transfers += spans_of(record, Kind.BROADCAST)
        computes += spans_of(record, Kind.COMPUTE)
    merged = merge(transfers)
    return Summary(
        forwards=forwards,
        forwards_with_history=with_history,
        broadcasts=broadcasts,
        bytes=nbytes,
        transfer_ns=sum(end - start for start, end in merged),
        exposed_ns=exposed,
        overlapped_ns=intersection(merged, merge(computes)),
    )


def spans_of(record: ForwardRecord, kind: Kind) -> list[Interval]:
    """When the nodes of one kind ran in a forward."""
    nodes = (node for node in record.graph.nodes if node.kind is kind)
    return [record.spans[node.id] for node in nodes if node.id in record.spans]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted, disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> int:
    """Length of the common part of two sorted, disjoint lists of intervals."""
    total = i = j = 0
    while i < len(left) and j < len(right):
        total += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total

"""Prove that forwards which may follow each other in any order are sound.

`verify` does so for one pair by looking at all nodes of both. Compiled forwards are fenced: every node is
ordered before the last one of the compute stream and after the first one. Then all of a forward is over
before anything of the next begins, no two nodes of different forwards can race, and what is left to check
across the border is what buffers hold there.
"""

from collections.abc import Iterator, Sequence

from kvpp_dag.errors import UnsoundGraphError
from kvpp_dag.graph.finding import Finding
from kvpp_dag.graph.nodes import COMPUTE_STREAM, Graph
from kvpp_dag.graph.order import Cycle, Order, order_of
from kvpp_dag.graph.verify import verify, verify_alone


def ensure_sound(graphs: Sequence[Graph]) -> None:
    """Raise UnsoundGraphError if one rank's graphs are unsound in any consecutive order.

    `graphs` are the kinds of forward that the rank may run in any order, e.g. with and without
    history.
    """
    findings = verify_sequences(graphs)
    if findings:
        more = f" ({len(findings) - 1} more findings)" if len(findings) > 1 else ""
        raise UnsoundGraphError(findings[0].message + more, findings)


def verify_sequences(graphs: Sequence[Graph]) -> tuple[Finding, ...]:
    """Findings of each graph, and of each followed by each; none exactly if `verify` has none for any pair."""
    orders = [order_of((graph,)) for graph in graphs]
    if any(map(verify_alone, graphs, orders)):
        return tuple(f for first in graphs for then in graphs for f in verify(first, then))
    fences = list(map(_Fence, graphs, orders))
    findings: list[Finding] = []
    for first, fence in zip(graphs, fences, strict=True):
        for then, other in zip(graphs, fences, strict=True):
            if fence.closed and other.closed:
                findings += _stale(fence, other)
            else:
                findings += verify(first, then)
    return tuple(findings)


class _Fence:
    """A sound graph as those around it see it."""

    def __init__(self, graph: Graph, order: Order | Cycle) -> None:
        self.graph = graph
        on_compute = [i for i, node in enumerate(graph.nodes) if node.stream == COMPUTE_STREAM]
        self.closed = (
            isinstance(order, Order)
            and bool(on_compute)
            and _encloses(order, on_compute[0], on_compute[-1])
        )
        self.left: dict[str, tuple[str, int | None]] = {}
        self.found: list[tuple[str, str, int]] = []
        if isinstance(order, Order):
            self._buffers(order)

    def _buffers(self, order: Order) -> None:
        """Who wrote each buffer last, and which reads find what was there before the forward."""
        writers: dict[str, list[int]] = {}
        for i, node in enumerate(self.graph.nodes):
            for buffer in node.writes:
                writers.setdefault(buffer, []).append(i)
        for buffer, places in writers.items():
            last = max(places, key=lambda i: order.ancestors[i].bit_count())
            self.left[buffer] = (self.graph.nodes[last].id, self.graph.nodes[last].layer)
        for j, node in enumerate(self.graph.nodes):
            for buffer in node.reads:
                before = any(order.ancestors[j] >> i & 1 for i in writers.get(buffer, ()))
                if node.layer is not None and not before:
                    self.found.append((buffer, node.id, node.layer))


def _encloses(order: Order, first: int, last: int) -> bool:
    """Whether everything is ordered after node `first` and before node `last`."""
    count = len(order.ancestors)
    everything = (1 << count) - 1
    return (order.ancestors[last] | 1 << last) == everything and all(
        i == first or order.ancestors[i] >> first & 1 for i in range(count)
    )


def _stale(first: _Fence, then: _Fence) -> Iterator[Finding]:
    """Reads of the second forward that find what the first one wrote there for another layer."""
    rank = first.graph.rank
    for buffer, reader, layer in then.found:
        writer, written = first.left.get(buffer, ("", layer))
        if written != layer:
            yield Finding(
                rule="content",
                rank=rank,
                nodes=(writer, reader),
                message=f"wrong content on rank {rank}: {reader} of the next forward reads {buffer} of "
                f"layer {layer}, but {writer} wrote it last.",
            )

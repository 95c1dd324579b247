"""The critical path of a recorded forward: what one would have to shorten to shorten the forward."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpp_dag.graph import Kind
from kvpp_dag.graph.nodes import EVENTS
from kvpp_dag.graph.order import direct_predecessors
from kvpp_dag.trace.records import ForwardRecord, Span


@dataclass(frozen=True, kw_only=True)
class PathStep:
    """`node` held the forward up from `start` to `end` (nanoseconds of the recording's clock).

    `kind` is the node's kind, or None where the host was on its way to `node` and nothing else ran that it
    had to wait for (to the end of the forward, if `node` is empty).
    """

    node: str
    start: int
    end: int
    kind: Kind | None


def end_of(record: ForwardRecord) -> int:
    """When a forward ended; for one in flight, the last time that was recorded."""
    spans = (*record.spans.values(), *record.waits.values())
    return max([record.began, record.ended, *([] if record.ended else [s.end for s in spans])])


def critical_path(record: ForwardRecord) -> tuple[PathStep, ...]:
    """Steps without a gap from the begin of the forward to its end, in time order.

    A node is held up by the last to end of the nodes it comes after, over edges or on its stream. So a wait
    appears as the transfer that was waited for.
    """
    return tuple(reversed(list(_backwards(record))))


def _backwards(record: ForwardRecord) -> Iterator[PathStep]:
    nodes = record.graph.nodes
    before = direct_predecessors((record.graph,))
    ran: list[Span | None] = [record.spans.get(node.id) for node in nodes]
    now = end_of(record)
    later = ""
    seen: set[int] = set()
    candidates: list[int] = list(range(len(nodes)))
    while True:
        ended = [(span.end, i) for i in candidates if (span := ran[i]) is not None and i not in seen]
        if not ended:
            break
        _, i = max(ended)
        span, candidates = ran[i] or Span(now, now), before[i]
        seen.add(i)
        if nodes[i].kind in EVENTS:
            continue
        end = max(record.began, min(span.end, now))
        start = max(record.began, min(span.start, end))
        if end < now:
            yield PathStep(node=later, start=end, end=now, kind=None)
        if start < end:
            yield PathStep(node=nodes[i].id, start=start, end=end, kind=nodes[i].kind)
        now, later = start, nodes[i].id
    if record.began < now:
        yield PathStep(node=later, start=record.began, end=now, kind=None)

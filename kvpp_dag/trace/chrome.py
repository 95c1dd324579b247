"""Chrome/Perfetto JSON of recorded forwards: one process per rank, one track per stream.

Format: the Trace Event Format that chrome://tracing and ui.perfetto.dev open. Times are microseconds.
Flow arrows lead from each layer's ready event over its broadcast and completion event to `attend`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence

from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Kind, Node
from kvpp_dag.trace.recorder import ForwardRecord, Span

TRACKS = {COMPUTE_STREAM: 1, TRANSFER_STREAM: 2}
_EVENT_NS = 500  # events have no duration; arrows need a slice to start from, so they get a short one
_FLOW = (("ready", "s"), ("broadcast", "t"), ("completion", "t"), ("attend", "f"))

TraceEvent = dict[str, object]


def to_chrome(ranks: Iterable[Sequence[ForwardRecord]]) -> str:
    """Write the forwards of one or more ranks; each item holds those of one rank."""
    events: list[TraceEvent] = []
    for records in ranks:
        if records:
            events += _names(records[0].graph.rank)
        for record in records:
            events += _forward(record)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _names(rank: int) -> Iterator[TraceEvent]:
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    for stream, tid in TRACKS.items():
        base: TraceEvent = {"ph": "M", "pid": rank, "tid": tid}
        yield base | {"name": "thread_name", "args": {"name": f"{stream} stream"}}
        yield base | {"name": "thread_sort_index", "args": {"sort_index": tid}}


def _forward(record: ForwardRecord) -> Iterator[TraceEvent]:
    graph = record.graph
    tracks: dict[str, list[tuple[Span, Node, bool]]] = {stream: [] for stream in TRACKS}
    for span in record.ran:
        node = graph[span.node]
        tracks[node.stream].append((span, node, False))
    for span in record.waited:
        tracks[COMPUTE_STREAM].append((span, graph[span.node], True))
    starts: dict[str, tuple[float, int]] = {}
    for stream, spans in tracks.items():
        spans.sort(key=lambda item: (item[0].start, item[0].end))
        outer = 0  # where the slice ends that a later one may lie in
        for i, (span, node, waited) in enumerate(spans):
            end = span.end
            if node.kind in (Kind.READY, Kind.COMPLETION) and not waited:
                end = span.start + _EVENT_NS
                following = spans[i + 1][0].start if i + 1 < len(spans) else record.ended or end
                end = max(span.start, min(end, following, outer if outer > span.start else end))
            outer = max(outer, end)
            if not waited:
                starts[node.id] = (span.start / 1000, TRACKS[stream])
            yield _slice(record, span, node, waited=waited, end=end)
    yield from _flows(record, starts)


def _slice(record: ForwardRecord, span: Span, node: Node, *, waited: bool, end: int) -> TraceEvent:
    args: dict[str, object] = {"forward": record.number, "layer": node.layer}
    if node.kind is Kind.BROADCAST:
        args |= {"owner": node.owner, "slot": node.slot, "bytes": node.bytes}
        args["submitted_us"] = record.submitted.get(node.id, span.start) / 1000
    return {
        "name": f"wait for {node.id}" if waited else node.id,
        "cat": "wait" if waited else str(node.kind),
        "ph": "X",
        "ts": span.start / 1000,
        "dur": (end - span.start) / 1000,
        "pid": record.graph.rank,
        "tid": TRACKS[COMPUTE_STREAM] if waited else TRACKS[node.stream],
        "args": args,
    }


def _flows(record: ForwardRecord, starts: dict[str, tuple[float, int]]) -> Iterator[TraceEvent]:
    """The arrow of each layer whose four nodes all ran."""
    rank = record.graph.rank
    for broadcast in record.graph.broadcasts:
        chain = [(f"{label}[{broadcast.layer}]", phase) for label, phase in _FLOW]
        if not all(node in starts for node, _ in chain):
            continue
        for node, phase in chain:
            ts, tid = starts[node]
            yield {
                "name": "kvpp",
                "cat": "dependency",
                "id": f"{rank}.{record.number}.{broadcast.layer}",
                "ph": phase,
                "ts": ts,
                "pid": rank,
                "tid": tid,
            } | ({"bp": "e"} if phase == "f" else {})


def merge_chrome(traces: Iterable[str]) -> str:
    """One trace of several ranks' traces of one host, whose clocks agree."""
    events = [event for trace in traces for event in json.loads(trace)["traceEvents"]]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})

"""Chrome/Perfetto JSON of recordings: a process per rank, a track per stream, counters below.

Format: the Trace Event Format that chrome://tracing and ui.perfetto.dev open. Times are microseconds of the
recordings' clock. Slices of a track nest. Flow arrows lead from each layer's ready event over its broadcast and
completion event to the compute that waits for it. Slices have the names of `kvpp_dag.graph.names`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Graph, Kind, Node
from kvpp_dag.graph.names import range_name, wait_name
from kvpp_dag.graph.nodes import EVENTS
from kvpp_dag.trace.counters import bytes_in_flight, slots_busy
from kvpp_dag.trace.records import ForwardRecord, Recording

_EVENT_NS = 500  # events have no duration; arrows need a slice to start from, so they get a short one

TraceEvent = dict[str, object]


def to_chrome(recordings: Iterable[Recording]) -> str:
    """Write the forwards of one or more ranks, one event a line."""
    return '{"displayTimeUnit": "ms", "traceEvents": ' + event_list(recordings) + "}\n"


def event_list(recordings: Iterable[Recording]) -> str:
    """The events of a trace as a JSON array, one event a line."""
    lines = (json.dumps(event) for recording in recordings for event in _recording(recording))
    return "[\n" + ",\n".join(lines) + "\n]"


def process_of(recording: Recording) -> int:
    """A number of its own for every rank of every stage."""
    return recording.stage * recording.ranks + recording.rank


def tracks_of(recording: Recording) -> dict[str, int]:
    """A track number per stream: compute 1, transfer 2, then what else the graphs have."""
    streams = [COMPUTE_STREAM, TRANSFER_STREAM]
    graphs = {id(record.graph): record.graph for record in recording.forwards}
    streams += [node.stream for graph in graphs.values() for node in graph.nodes]
    return {stream: number for number, stream in enumerate(dict.fromkeys(streams), 1)}


def _recording(recording: Recording) -> Iterator[TraceEvent]:
    pid, tracks = process_of(recording), tracks_of(recording)
    name = f"stage {recording.stage} rank {recording.rank}"
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    for stream, tid in tracks.items():
        base: TraceEvent = {"ph": "M", "pid": pid, "tid": tid}
        yield base | {"name": "thread_name", "args": {"name": f"{stream} stream"}}
        yield base | {"name": "thread_sort_index", "args": {"sort_index": tid}}
    for stream, tid in tracks.items():
        for slice_ in _nested(_slices(recording, stream)):
            yield slice_.event(recording) | {"pid": pid, "tid": tid}
    chains = {id(record.graph): _chains(record.graph) for record in recording.forwards}
    for record in recording.forwards:
        for number, chain in enumerate(chains[id(record.graph)]):
            flow = f"{pid}.{record.number}.{number}"
            yield from ({"id": flow, "pid": pid} | arrow for arrow in _arrows(record, chain, tracks))
    for counter, unit, steps in (
        ("bytes in flight", "bytes", bytes_in_flight(recording.forwards)),
        ("slots busy", "slots", slots_busy(recording.forwards)),
    ):
        for time, value in steps:
            yield {"name": counter, "ph": "C", "ts": time / 1000, "pid": pid, "args": {unit: value}}


@dataclass(kw_only=True)
class _Slice:
    """A node that ran, or a wait for one, until `end`."""

    record: ForwardRecord
    node: Node
    waited: bool
    start: int
    end: int

    @property
    def is_event(self) -> bool:
        return self.node.kind in EVENTS and not self.waited

    def event(self, recording: Recording) -> TraceEvent:
        node = self.node
        args: dict[str, object] = {"forward": self.record.number, "node": node.id}
        if node.layer is not None:
            args |= {"layer": node.layer, "layer_name": recording.layer_name(node.layer)}
        if node.kind is Kind.BROADCAST:
            args |= {"owner": node.owner, "slot": node.slot, "bytes": node.bytes}
        if node.id in self.record.submitted:
            args["submitted_us"] = self.record.submitted[node.id] / 1000
        return {
            "name": wait_name(node.id) if self.waited else range_name(node.id),
            "cat": "wait" if self.waited else str(node.kind),
            "ph": "X",
            "ts": self.start / 1000,
            "dur": (self.end - self.start) / 1000,
            "args": args,
        }


def _slices(recording: Recording, stream: str) -> list[_Slice]:
    """What is on the track of `stream`, outer slices before inner ones."""
    slices = []
    for record in recording.forwards:
        for node_id, span in record.spans.items():
            node = record.graph[node_id]
            if node.stream == stream:
                slices.append(
                    _Slice(record=record, node=node, waited=False, start=span.start, end=span.end)
                )
        if stream == COMPUTE_STREAM:
            for event, span in record.waits.items():
                node = record.graph[event]
                slices.append(
                    _Slice(record=record, node=node, waited=True, start=span.start, end=span.end)
                )
    slices.sort(key=lambda s: (s.start, -s.end))
    return slices


def _nested(slices: Sequence[_Slice]) -> Sequence[_Slice]:
    """The slices of a track with ends such that they nest.

    An event gets some width, as far as there is room. A slice that would end inside a later one ends where that
    one starts; on one stream that is the inexactness of a clock.
    """
    open_: list[_Slice] = []
    for slice_ in slices:
        while open_ and (open_[-1].end <= slice_.start or open_[-1].is_event):
            open_[-1].end = min(open_[-1].end, slice_.start)
            open_.pop()
        if slice_.is_event:
            room = open_[-1].end if open_ else slice_.record.ended
            end = slice_.start + _EVENT_NS
            slice_.end = min(end, room) if room > slice_.start else end
        while open_ and open_[-1].end < slice_.end:
            open_.pop().end = slice_.start
        open_.append(slice_)
    return slices


def _chains(graph: Graph) -> list[list[Node]]:
    """Per transferred layer its ready event, broadcasts, completion event, and who waits for that."""
    layers: dict[int | None, list[Node]] = {node.layer: [] for node in graph.broadcasts}
    completed: dict[str, int | None] = {}
    waiting: set[int | None] = set()
    for node in graph.nodes:
        if node.layer in layers and (node.kind in EVENTS or node.kind is Kind.BROADCAST):
            layers[node.layer].append(node)
            if node.kind is Kind.COMPLETION:
                completed[node.id] = node.layer
    for node in graph.nodes:
        for before in node.after:
            if node.kind is Kind.COMPUTE and before in completed and completed[before] not in waiting:
                waiting.add(completed[before])
                layers[completed[before]].append(node)
    return [chain for layer, chain in layers.items() if layer in waiting]


def _arrows(
    record: ForwardRecord, chain: Sequence[Node], tracks: dict[str, int]
) -> Iterator[TraceEvent]:
    """The arrow over a chain whose nodes all ran, one after the other."""
    if not all(node.id in record.spans for node in chain):
        return
    times = [record.spans[node.id].start for node in chain]
    if times != sorted(times):
        return
    for i, (node, time) in enumerate(zip(chain, times, strict=True)):
        last = i == len(chain) - 1
        arrow: TraceEvent = {
            "name": "kvpp",
            "cat": "dependency",
            "ph": "f" if last else "t" if i else "s",
            "ts": time / 1000,
            "tid": tracks[node.stream],
        }
        yield arrow | ({"bp": "e"} if last else {})

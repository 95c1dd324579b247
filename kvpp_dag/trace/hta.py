"""Traces for Holistic Trace Analysis (HTA, checked with 0.5.0): one `rank{r}_trace.json.gz` per rank.

HTA reads profiler traces of accelerators, so a recording is written as one: nodes that take time are kernels of
streams 1 (compute) and 2 (transfer), each launched by a host event with the same correlation, and forwards are
profiler steps. Broadcasts are named `ncclDevKernel_Broadcast kvpp.layer_12`: HTA takes what matches
`^nccl.*Kernel` for communication, what starts with Memcpy (copies) for memory, and the rest here for computation.
Waits and events are left out: nothing runs in them. HTA leaves out the last step, so an empty one is added.

HTA rounds times to whole microseconds, inwards, unless HTA_DISABLE_NS_ROUNDING=1 is set; with that its overlap
of communication and computation is `Summary.overlap_percent`, rounded to two decimals.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import count

from kvpp_dag.errors import DumpError
from kvpp_dag.graph import Kind, Node
from kvpp_dag.graph.names import range_name
from kvpp_dag.graph.nodes import EVENTS
from kvpp_dag.trace.chrome import TraceEvent, process_of, tracks_of
from kvpp_dag.trace.critical import end_of
from kvpp_dag.trace.records import ForwardRecord, Recording

_HOST = 0  # the track of the host; streams are tracks 1, 2, ...
_LAUNCH_US = 0.001


def to_hta(recordings: Sequence[Recording]) -> dict[str, bytes]:
    """The files of a directory that HTA opens, by name; ranks of later stages are counted on.

    Raises DumpError if a recording has no forwards, of which HTA could show nothing.
    """
    for recording in recordings:
        if not recording.forwards:
            raise DumpError(
                f"The recording of stage {recording.stage}, rank {recording.rank} holds no forwards; expected "
                "at least one to export."
            )
    origin = min((r.began for recording in recordings for r in recording.forwards), default=0)
    world = max((process_of(recording) + 1 for recording in recordings), default=0)
    return {
        f"rank{process_of(recording)}_trace.json.gz": gzip.compress(
            _trace(recording, origin, world).encode(), mtime=0
        )
        for recording in recordings
    }


def _trace(recording: Recording, origin: int, world: int) -> str:
    head = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": process_of(recording), "world_size": world},
        "baseTimeNanoseconds": origin,
        "displayTimeUnit": "ms",
    }
    # The rank stands on a line of its own near the top, where HTA searches for it line by line.
    lines = (json.dumps(event) for event in _events(recording, origin))
    return json.dumps(head, indent=1)[:-2] + ',\n "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"


def _events(recording: Recording, origin: int) -> Iterator[TraceEvent]:
    pid, tracks = process_of(recording), tracks_of(recording)
    correlations = count(1)
    ended = origin
    for record in recording.forwards:
        ended = max([ended, record.ended, *(span.end for span in record.spans.values())])
        yield _step(pid, record.number, record.began, end_of(record), origin)
        for node in record.graph.nodes:
            if node.kind not in EVENTS and node.id in record.spans:
                yield from _kernel(pid, tracks[node.stream], record, node, next(correlations), origin)
    last = max(record.number for record in recording.forwards)
    yield _step(pid, last + 1, ended + 1, ended + 1, origin)


def _step(pid: int, number: int, start: int, end: int, origin: int) -> TraceEvent:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"ProfilerStep#{number}",
        "pid": pid,
        "tid": _HOST,
        "ts": (start - origin) / 1000,
        "dur": (end - start) / 1000,
        "args": {},
    }


def _kernel(
    pid: int, stream: int, record: ForwardRecord, node: Node, correlation: int, origin: int
) -> Iterator[TraceEvent]:
    """A node as a kernel, and what launched it: the host's submission, where one was recorded."""
    span = record.spans[node.id]
    sent = node.kind is Kind.BROADCAST
    args: TraceEvent = {"correlation": correlation, "node": node.id, "forward": record.number}
    yield {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": pid,
        "tid": _HOST,
        "ts": (record.submitted.get(node.id, span.start) - origin) / 1000,
        "dur": _LAUNCH_US,
        "args": args,
    }
    yield {
        "ph": "X",
        "cat": "kernel",
        "name": _kernel_name(node),
        "pid": pid,
        "tid": stream,
        "ts": (span.start - origin) / 1000,
        "dur": span.duration / 1000,
        "args": args | {"stream": stream, "device": pid} | ({"bytes": node.bytes} if sent else {}),
    }


def _kernel_name(node: Node) -> str:
    """A name by which HTA takes a node for what it is: communication, computation, else memory."""
    match node.kind:
        case Kind.BROADCAST:
            return f"ncclDevKernel_Broadcast kvpp.layer_{node.layer}"
        case Kind.COMPUTE:
            return range_name(node.id)
        case _:
            return f"Memcpy {range_name(node.id)}"

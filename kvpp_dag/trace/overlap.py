"""What was hidden, what was exposed and why, per forward and per layer.

`analyze` takes the recordings of one or more ranks. Times are nanoseconds. Overlap in per cent is defined as
in Holistic Trace Analysis (see `kvpp_dag.trace.summary`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpp_dag.graph import Kind
from kvpp_dag.trace.causes import ADVICE, Cause, Part, causes
from kvpp_dag.trace.critical import PathStep, critical_path, end_of
from kvpp_dag.trace.records import ForwardRecord, Recording, Span
from kvpp_dag.trace.replay import bounds
from kvpp_dag.trace.summary import intersection, merge, spans_of
from kvpp_dag.trace.transfers import transfers

__all__ = ["ADVICE", "Cause", "ForwardOverlap", "LayerOverlap", "Part", "PathStep", "analyze"]


@dataclass(frozen=True, kw_only=True)
class LayerOverlap:
    """One layer of one forward. `parts` add up to `exposed_ns`, the largest first.

    `bytes` is what was sent, `needed_bytes` what the batch's history fills of it, where that is known. A
    transfer that did not finish counts as none.
    """

    layer: int
    name: str
    owner: int | None
    slot: int | None
    bytes: int
    needed_bytes: int | None
    transfer_ns: int
    exposed_ns: int
    parts: tuple[Part, ...]

    @property
    def hidden_share(self) -> float:
        """Share of the transfer's time that compute did not wait for, from 0 to 1."""
        return _hidden_share(self.transfer_ns, self.exposed_ns)


@dataclass(frozen=True, kw_only=True)
class ForwardOverlap:
    """One forward of one rank.

    `transfer_ns`, `exposed_ns` and `bytes` are sums over `layers`, which are those with a transfer or a wait.
    `needed_bytes` is None unless it is known for all of them. `free_transfers_ns` is what the forward would
    take if every transfer took no time, and `free_compute_ns` if every compute node did.
    """

    rank: int
    number: int
    duration_ns: int
    transfer_ns: int
    exposed_ns: int
    overlap_percent: float
    bytes: int
    needed_bytes: int | None
    layers: tuple[LayerOverlap, ...]
    critical_path: tuple[PathStep, ...]
    free_transfers_ns: int
    free_compute_ns: int

    @property
    def hidden_share(self) -> float:
        """As `LayerOverlap.hidden_share`, over all layers."""
        return _hidden_share(self.transfer_ns, self.exposed_ns)


def analyze(recordings: Sequence[Recording]) -> tuple[tuple[ForwardOverlap, ...], ...]:
    """The forwards of each recording, in the order given.

    Forwards are matched between ranks by number. The times of other ranks are used only where `clock` and
    `stage` are equal; without them no wait is put down to a peer.
    """
    groups: dict[tuple[str, int], dict[int, dict[int, ForwardRecord]]] = {}
    for recording in recordings:
        numbered = {forward.number: forward for forward in recording.forwards}
        groups.setdefault((recording.clock, recording.stage), {})[recording.rank] = numbered
    result = []
    for recording in recordings:
        others = groups[recording.clock, recording.stage]
        forwards = []
        for record in recording.forwards:
            peers = {
                rank: numbered[record.number]
                for rank, numbered in others.items()
                if rank != recording.rank and record.number in numbered
            }
            forwards.append(_forward(recording, record, peers))
        result.append(tuple(forwards))
    return tuple(result)


def _forward(
    recording: Recording, record: ForwardRecord, peers: Mapping[int, ForwardRecord]
) -> ForwardOverlap:
    done = transfers(record, peers)
    waits = _waits(record)
    why = causes(record, peers, done, waits)
    described = {node.layer: node for node in reversed(record.graph.broadcasts)}
    layers = tuple(
        LayerOverlap(
            layer=layer,
            name=recording.layer_name(layer),
            owner=described[layer].owner if layer in described else None,
            slot=described[layer].slot if layer in described else None,
            bytes=done[layer].bytes if layer in done else 0,
            needed_bytes=_needed_bytes(recording, record, layer),
            transfer_ns=done[layer].end - done[layer].start if layer in done else 0,
            exposed_ns=waits[layer].duration if layer in waits else 0,
            parts=why[layer],
        )
        for layer in sorted({*done, *waits})
    )
    sent, beside = merge(spans_of(record, Kind.BROADCAST)), merge(spans_of(record, Kind.COMPUTE))
    sent_ns = sum(end - start for start, end in sent)
    needed = [layer.needed_bytes for layer in layers]
    free_transfers, free_compute = bounds(record, done)
    return ForwardOverlap(
        rank=recording.rank,
        number=record.number,
        duration_ns=end_of(record) - record.began,
        transfer_ns=sum(layer.transfer_ns for layer in layers),
        exposed_ns=sum(layer.exposed_ns for layer in layers),
        overlap_percent=100 * intersection(sent, beside) / sent_ns if sent_ns else 0.0,
        bytes=sum(layer.bytes for layer in layers),
        needed_bytes=None if None in needed else sum(n for n in needed if n is not None),
        layers=layers,
        critical_path=critical_path(record),
        free_transfers_ns=free_transfers,
        free_compute_ns=free_compute,
    )


def _waits(record: ForwardRecord) -> dict[int, Span]:
    """The exposed wait of each layer. One that waited more than once has its waits put together at the last."""
    result: dict[int, Span] = {}
    for event, span in record.waits.items():
        layer = record.graph[event].layer
        if layer is not None:
            before = result.get(layer, Span(span.start, span.start))
            end = max(before.end, span.end)
            result[layer] = Span(end - before.duration - max(0, span.duration), end)
    return result


def _needed_bytes(recording: Recording, record: ForwardRecord, layer: int) -> int | None:
    plan = recording.plan
    if plan is None or record.needed_blocks is None or layer >= len(plan.bundles):
        return None
    return record.needed_blocks * plan.bundles[layer].bytes_per_block


def _hidden_share(transfer: int, exposed: int) -> float:
    if not transfer:
        return 0.0 if exposed else 1.0
    return min(1.0, max(0.0, 1 - exposed / transfer))

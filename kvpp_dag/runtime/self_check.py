"""The self check before the first forward: do known bytes arrive, on this machine, in every way there is to send?

Whether waits between streams hold, collectives are ordered by streams and packed blocks land where they
belong is up to a driver, a communication library and their settings, and no proof of a graph can tell. So
every kind of forward is run over the real caches, streams and transport. Owners write known bytes into some
blocks of each layer, in the forward before, where an engine would write them. Every rank compares what it
holds where compute may read it, overwrites what it has compared, and delays one stream after the other, so
that whatever is not held back goes wrong. The device compares, and the host looks once, at the end.
"""

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpp_dag.errors import DivergenceError, SelfCheckError, TransferError
from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.plan.stage import ceil_div
from kvpp_dag.runtime.accelerator import AcceleratorStream
from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.delay import Delay
from kvpp_dag.runtime.forward import ForwardPass
from kvpp_dag.runtime.kinds import Streams
from kvpp_dag.runtime.known_bytes import KnownBytes
from kvpp_dag.runtime.payload import FULL, NOTHING, BlocksInUse, Ids, Kind, Way, blocks_in_use
from kvpp_dag.runtime.streams import Stream
from kvpp_dag.runtime.transport import Transport

LARGEST = 128 << 20
"""Bytes that a forward of whole bundles may send here; larger ones are cut to the blocks that are compared."""

FEWEST_BLOCKS = 4
"""Blocks compared of each layer, where the cache has them; more where there are more chunks to fill."""

LAYERS_LATE = 3
"""How long a delay is at first: so many times what the slowest layer of a forward in time takes this host."""

SHORTEST, LONGEST = 1e-3, 8e-3
"""Bounds of a delay, in seconds."""

PER_FORWARD, LEAST_LATE = 15e-3, 5
"""Seconds of delays in one forward, and layers that are late at least: with more, layers take turns."""

MANY_CHUNKS = 2
"""Chunks up to which each stream is late in turn with many layers too."""

FEWEST_LATE, FEW_LAYERS = 12, 16
"""Forwards that are late at least, so that with few kinds each is repeated; and layers up to which it is anyway."""


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """A self check that found nothing wrong: how many forwards, of which kinds, in how many seconds."""

    forwards: int
    kinds: tuple[Kind, ...]
    seconds: float

    def text(self) -> str:
        """One line for a log."""
        ways = ", ".join(name_way(kind) for kind in self.kinds)
        return f"{self.forwards} forwards in {self.seconds:.2f} s ({ways})"


@dataclass(frozen=True, kw_only=True)
class _Rehearsal:
    """A forward of the self check; `late` is the stream that is delayed in it, if any.

    It is delayed on a layer's owner or on all others, in turns from layer to layer, since a rank that comes late
    to a collective holds up all of them. `turn` is that of layer 0: 0 for its owner.
    """

    kind: Kind
    blocks: BlocksInUse
    late: str | None = None
    turn: int = 0


def check_forwards(
    forward: ForwardPass, *, arena: Arena, transport: Transport, streams: Streams, timeout: float
) -> SelfCheck:
    """Run every kind of forward with known bytes; all ranks of the group call this together, before the first one.

    `arena`, `transport` and `streams` are those of `forward`. Afterwards the forwards count from one, no
    observer has seen anything, the blocks and staging halves used here hold zeros, and no stream runs.

    Raises SelfCheckError on every rank if any rank held something else than what was sent, naming the layer,
    the way and the first wrong block, and whatever a forward raises. `timeout` (seconds) bounds each wait.
    """
    started = time.perf_counter()
    check = _Check(forward, arena, streams, timeout)
    found = check.run()
    _agree(transport, found)
    check.clear()
    return SelfCheck(
        forwards=len(check.rehearsals), kinds=check.kinds, seconds=time.perf_counter() - started
    )


def name_way(kind: Kind) -> str:
    """How a kind of forward sends, in words."""
    way, chunks = kind
    if way is Way.PACKED:
        return f"packed in {chunks} chunk{'s' if chunks > 1 else ''}"
    return str(way)


class _Check:
    def __init__(self, forward: ForwardPass, arena: Arena, streams: Streams, timeout: float) -> None:
        self._forward = forward
        self._arena = arena
        self._streams: dict[str, Stream[Any]] = {
            COMPUTE_STREAM: streams.compute,
            TRANSFER_STREAM: streams.transfer,
            COPY_STREAM: streams.copy,
        }
        self._timeout = timeout
        self.kinds = forward.kinds_to_rehearse(LARGEST)
        self.rehearsals = tuple(_rehearsals(self.kinds, arena))
        self._known = KnownBytes(arena, [r.blocks.used for r in self.rehearsals])
        self._delay = Delay(arena.device, streams.compute, timeout=timeout)
        # A worker of the host has a whole forward already when its first hook runs.
        self._on_device = isinstance(streams.transfer, AcceleratorStream)
        self._seconds = SHORTEST  # of a delay
        self._too_short = False  # whether one was, in this forward
        self._per_forward = 0  # layers that are late in one forward
        self._delays: deque[tuple[int, Any]] = deque()  # their ends, by the layer to be submitted before

    def run(self) -> str | None:
        """Run all forwards; what was wrong, in a sentence, or None."""
        for bundle in self._arena.plan.owned(self._arena.rank):
            self._known.write(bundle.ordinal, 0)
        try:
            self._run_in_time()
            self._run_late()
            self._synchronize()
        except BaseException as error:
            self._forward.abort(error)
            raise
        wrong = self._known.wrong()
        return self._describe(wrong) if len(wrong) else None

    def clear(self) -> None:
        """Zero what was written to, and take the forwards back."""
        self._known.clear()
        if self._arena.plan.staging:
            packed = [r for r in self.rehearsals if r.kind[0] is Way.PACKED]
            blocks = max((ceil_div(len(r.blocks.used), r.kind[1]) for r in packed), default=0)
            for half in range(2):
                self._arena.staging(half)[: blocks * self._arena.plan.largest_bundle].zero_()
        self._synchronize()
        self._forward.forget()

    def _run_in_time(self) -> None:
        """The forwards without delays, after which it is known how long delays have to be."""
        slowest = 0.0
        for number, rehearsal in enumerate(self.rehearsals):
            if rehearsal.late is None:
                slowest = self._rehearse(number)  # the last one counts: those before it warm up
        self._synchronize()
        self._seconds = min(max(SHORTEST, LAYERS_LATE * slowest), LONGEST)
        self._delay.last(self._seconds)
        self._share_out()

    def _share_out(self) -> None:
        """Let as many layers of a forward be late as its delays may take together."""
        layers = len(self._arena.plan.bundles)
        self._per_forward = min(layers, max(LEAST_LATE, int(PER_FORWARD / self._seconds)))

    def _run_late(self) -> None:
        """The forwards with delays, which come last; two of them are in flight at a time."""
        for number, rehearsal in enumerate(self.rehearsals):
            if rehearsal.late is not None:
                self._rehearse(number)

    def _rehearse(self, number: int) -> float:
        """Submit one forward, and what an engine's compute would do to the caches; seconds of the slowest layer."""
        plan, rank = self._arena.plan, self._arena.rank
        ahead = plan.depth + (self._forward.graphs[FULL].policy is Policy.ON_RELEASE)
        kind, late = self.rehearsals[number].kind, self.rehearsals[number].late
        beside = self._streams[late] if late in (TRANSFER_STREAM, COPY_STREAM) else None
        if beside is not None and self._is_late(0, number):
            self._delay_on(beside, 0)
        slowest, before = 0.0, time.perf_counter()
        self._forward.rehearse(kind, self.rehearsals[number].blocks)
        self._look_at_delays(0)
        for bundle in plan.bundles:
            layer, owned = bundle.ordinal, plan.owners[bundle.ordinal] == rank
            if beside is not None and self._on_device and self._is_late(layer + ahead, number):
                self._delay_on(beside, layer + ahead)
            self._forward.acquire(layer)
            if late == COMPUTE_STREAM and self._is_late(layer, number):
                self._delay_on(self._streams[COMPUTE_STREAM], layer + ahead)
            if owned or kind != NOTHING:
                self._known.compare(layer, number)
            if not owned:
                self._known.poison(layer, number)
            elif number + 1 < len(self.rehearsals):
                self._known.write(layer, number + 1)
            self._forward.release(layer)
            self._look_at_delays(layer)
            now = time.perf_counter()
            slowest, before = max(slowest, now - before), now
        self._look_at_delays(len(plan.bundles) + ahead)
        self._forward.end()
        if self._too_short and self._seconds < LONGEST:
            self._seconds *= 2
            self._delay.double()
            self._share_out()
        self._too_short = False
        return slowest

    def _delay_on(self, stream: Stream[Any], until: int) -> None:
        """Delay a stream, for longer than it takes the host to submit what follows up to layer `until`."""
        stream.launch(self._delay)
        if self._on_device:
            over = stream.event("the end of a delay")
            stream.record(over)
            self._delays.append((until, over))

    def _look_at_delays(self, submitted: int) -> None:
        """Note whether a delay was over before the host had submitted layer `submitted`."""
        while self._delays and self._delays[0][0] <= submitted:
            self._too_short |= self._delays.popleft()[1].query()

    def _is_late(self, layer: int, number: int) -> bool:
        """Whether this rank is late for `layer` in forward `number`: layers take turns, and so do owners and others."""
        plan = self._arena.plan
        layers = len(plan.bundles)
        if layer >= layers or (layer + number) * self._per_forward % layers >= self._per_forward:
            return False
        owned = plan.owners[layer] == self._arena.rank
        return owned == ((layer + self.rehearsals[number].turn) % 2 == 0)

    def _synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize(self._timeout)

    def _describe(self, wrong: NDArray[np.int64]) -> str:
        """What was wrong first, how much more was, and what to try."""
        plan, rank = self._arena.plan, self._arena.rank
        number, layer, part, place = wrong[0].tolist()
        rehearsal, bundle = self.rehearsals[number], plan.bundles[layer]
        owner = plan.owners[layer]
        what = "what this rank itself had written" if owner == rank else f"what rank {owner} had sent"
        late = f", while the {rehearsal.late} stream was late" if rehearsal.late else ""
        return (
            f"The self check failed on rank {rank}: layer {bundle.layer!r} (ordinal {layer}) did not hold {what} "
            f"when compute might read it, in a forward of the way {name_way(rehearsal.kind)!r}{late}. The first "
            f"wrong block is {rehearsal.blocks.used[place]} of {bundle.spec.components[part].name!r}; "
            f"{len(set(wrong[:, 1].tolist()))} of {len(plan.bundles)} layers were wrong, in "
            f"{len(set(wrong[:, 0].tolist()))} of {len(self.rehearsals)} forwards. Outputs would be wrong on this "
            "machine. Check the versions and settings of the driver and of the communication library; if the "
            "way is not 'full', try payload full, else another transport."
        )


def _rehearsals(kinds: Sequence[Kind], arena: Arena) -> Iterator[_Rehearsal]:
    """Three forwards in time, of which the last shows what a layer takes; then every kind with each stream late."""
    blocks = {kind: _some_blocks(kind, arena) for kind in kinds}
    for kind in (*kinds[:2], kinds[1]):
        yield _Rehearsal(kind=kind, blocks=blocks[kind])
    few = len(arena.plan.bundles) <= FEW_LAYERS
    late = [(kind, stream) for kind in kinds for stream in _late_streams(kind, few)]
    turns = 2 if few else 1
    for turn in range(max(turns, ceil_div(FEWEST_LATE, len(late)))):
        for kind, stream in late:
            yield _Rehearsal(kind=kind, blocks=blocks[kind], late=stream, turn=turn)


def _late_streams(kind: Kind, few: bool) -> list[str]:
    """Which streams are late in forwards of a kind, one in each: all that it uses.

    With many layers many chunks take long, and one stream has to do, another for each number of them.
    """
    streams = [COMPUTE_STREAM]
    if kind != NOTHING:
        streams.append(TRANSFER_STREAM)
    if kind[0] is Way.PACKED and kind[1] > 1:
        streams.append(COPY_STREAM)
    chosen = kind[1].bit_length() % len(streams)
    return streams if few or kind[1] <= MANY_CHUNKS else [streams[chosen]]


def _some_blocks(kind: Kind, arena: Arena) -> BlocksInUse:
    """The blocks that are compared: the first two, the last, some between; two in each chunk but the last.

    Of runs there are several, and one is of two blocks.
    """
    chunks, most = kind[1], arena.num_blocks
    if kind[0] is Way.PACKED:
        most = min(most, chunks * arena.plan.staging_blocks(arena.num_blocks))
    count = min(max(FEWEST_BLOCKS, 2 * chunks - 1), most)
    spread = np.linspace(0, arena.num_blocks - 1, max(count - 1, 1)).astype(np.int64)
    ids: Ids = np.union1d(spread, np.arange(min(2, count), dtype=np.int64))
    return blocks_in_use(ids[:count], (), arena.num_blocks)


def _agree(transport: Transport, found: str | None) -> None:
    """Raise SelfCheckError on every rank if any of them has found something wrong."""
    try:
        transport.agree(hashlib.sha256((found or "").encode()).digest())
    except TransferError as error:
        if found is None and isinstance(error, DivergenceError):
            raise SelfCheckError(
                f"The self check found nothing wrong on rank {transport.rank}, but failed on another rank of its "
                "group; the log of that one says what was wrong."
            ) from error
        if found is None:
            raise
    if found is not None:
        raise SelfCheckError(found)

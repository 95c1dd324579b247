"""Run forwards for an engine that owns the compute: begin, acquire, release, end, abort.

    forward.begin(history=True)
    for layer in range(layers):
        ...projections of the layer...
        forward.acquire(layer)      # before the first access to the layer's cache
        ...attention...
        forward.release(layer)      # after the last access
    forward.end()

The hooks must come in this order; anything else is a typed error and leaves the forward in flight,
until `abort` drains it.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvpp_dag.errors import ConfigError, CoverageError, OrderError, ReentryError, TransferError
from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.bind import Call
from kvpp_dag.runtime.observer import Observer, Watch
from kvpp_dag.runtime.payload import FULL, NOTHING, BlocksInUse, Costs, Ids, Kind, Payload
from kvpp_dag.runtime.programs import CUT, GENERATIONS, Programs
from kvpp_dag.runtime.sending import Sending
from kvpp_dag.runtime.streams import E, Stream
from kvpp_dag.runtime.tape import Tape
from kvpp_dag.runtime.transport import Transport


class ForwardPass:
    """The forwards of one rank, one at a time.

    All graphs are compiled and verified here, before anything runs: UnsoundGraphError if one has a
    race or a deadlock, ConfigError if `arena` and `transport` are not those of one rank, or if what `payload`
    needs is missing: staging halves in the plan, and a `copy` stream to pack and unpack on.
    `control` is where the ranks compare their forwards before the first transfer: the transfer stream, if
    none is given, which on an accelerator would block the host. `observer` is given a tape of each forward.
    `costs` must be equal on all ranks. `skip_broadcasts` leaves every transfer out but keeps the events: the
    control that shows whether an output depends on the transfers. `timeout` (seconds) bounds an abort.
    `compare_blocks` makes the ranks compare which blocks they send, and not only how many. `profiled` puts
    hooks, transfers and layers into ranges for a profiler; see `runtime.ranges`.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        transport: Transport,
        compute: Stream[E],
        transfer: Stream[E],
        copy: Stream[E] | None = None,
        control: Stream[Any] | None = None,
        policy: Policy = Policy.ON_ACQUIRE,
        payload: Payload = Payload.FULL,
        costs: Costs | None = None,
        observer: Observer | None = None,
        timeout: float = 60.0,
        skip_broadcasts: bool = False,
        compare_blocks: bool = False,
        profiled: bool = False,
    ) -> None:
        self.plan = arena.plan
        self.rank = arena.rank
        if (transport.rank, transport.size) != (self.rank, self.plan.ranks):
            raise ConfigError(
                f"The arena is that of rank {self.rank} of {self.plan.ranks}, but the transport is that "
                f"of rank {transport.rank} of {transport.size}; both must belong to one rank."
            )
        self.payload = payload
        self.forwards = 0
        self.forwards_with_history = 0
        self._layers = len(self.plan.bundles)
        self._streams: dict[str, Stream[Any]] = {COMPUTE_STREAM: compute, TRANSFER_STREAM: transfer}
        if copy is not None:
            self._streams[COPY_STREAM] = copy
        self._control = control or transfer
        self._agreed = None if control is None else control.event("the comparison of the forwards")
        self._watch = None if observer is None else Watch(observer)
        self._watched: Tape | None = None  # of the forward in flight, if an observer knows of it
        self._timeout = timeout
        self._sending = Sending(
            arena,
            transport,
            payload=payload,
            costs=costs or Costs(),
            copies=copy is not None,
            compare_blocks=compare_blocks,
            skip_broadcasts=skip_broadcasts,
        )
        compare: list[Call] = [partial(self._control.launch, self._sending.agree)]
        if self._agreed is not None:
            compare.append(partial(self._control.record, self._agreed))
        self._programs = Programs(
            arena,
            transport,
            self._streams,
            policy=policy,
            chooser=self._sending.chooser,
            compare=tuple(compare) if self._sending.sends else (),
            observer=observer,
            timeout=timeout,
            skip_broadcasts=skip_broadcasts,
            profiled=profiled,
        )
        self.graphs = self._programs.graphs
        self._program = self._programs.of(NOTHING, 0)
        self._active = False
        self._broken: BaseException | None = None
        self._cursor = 0
        self._held: int | None = None
        self._next = 0
        self._failed = False

    @property
    def active(self) -> bool:
        """Whether a forward is in flight."""
        return self._active

    @property
    def held(self) -> int | None:
        """The layer that was acquired and not yet released, if there is one."""
        return self._held

    @property
    def signature(self) -> bytes:
        """16 bytes that all ranks must share before the first forward: layout, blocks, what is sent and how."""
        graph = self.graphs[FULL]
        sent = self.bytes_per_forward
        content = (self.plan.layout_hash, graph.policy, sent, self.payload, self._sending.chooser)
        return hashlib.sha256(repr(content).encode()).digest()[:16]

    @property
    def broadcasts_per_forward(self) -> int:
        """Broadcasts of one forward that sends whole bundles (0 if they are skipped)."""
        return len(self.graphs[FULL].broadcasts) if self._sending.sends else 0

    @property
    def bytes_per_forward(self) -> int:
        """Payload bytes that one forward broadcasts in this group if it sends whole bundles."""
        return sum(n.bytes for n in self.graphs[FULL].broadcasts) if self._sending.sends else 0

    @property
    def broadcasts_sent(self) -> int:
        """Broadcasts of all forwards begun so far."""
        return self._sending.broadcasts

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of all forwards begun so far."""
        return self._sending.bytes

    def begin(
        self,
        *,
        history: bool,
        used: Sequence[int] | Ids | None = None,
        fresh: Sequence[int] | Ids = (),
    ) -> None:
        """Begin a forward; with `history` the first layers start to arrive.

        `history` is whether any real request has computed tokens. `used` are the blocks that hold them, if
        the engine can tell, and `fresh` those that this forward writes and that hold none: each ascending
        and without repetition, copied before this returns. With a payload other than `FULL` no other block
        may be read. Fresh ones hold zeros where a layer is received by blocks, until they are written, and
        elsewhere what they held before. All ranks must say the same.

        Raises ReentryError while another forward is in flight, whose pending work is kept, BlocksError for
        lists that are not as above, and TransferError if an earlier failure left the group unusable. On an
        accelerator the host waits here until at most one forward is left on the compute stream, and learns of
        a device that failed or hangs.
        """
        number = self._next_number()
        kind, sent = self._sending.choose(number, history, used, fresh, self._programs.lists)
        self._take_up(number, kind)
        self.forwards_with_history += history
        if self._watch is not None and self._program.tape is not None:
            needed = None if used is None else len(used)
            self._watched = self._program.tape
            self._watch.began(self._watched, number, needed, sent)
        self._run_hook()

    def rehearse(self, kind: Kind, blocks: BlocksInUse) -> None:
        """Begin a forward of the self check: of `kind`, which sends `blocks` if it does not send all.

        The hooks follow as in any other. No observer is told of it, nothing that it sends is counted, and
        `forget` takes its number back. Raises as `begin` does.
        """
        number = self._next_number()
        self._sending.rehearse(number, kind, blocks, self._programs.lists)
        self._take_up(number, kind)
        self._run_hook()

    def kinds_to_rehearse(self, largest: int) -> tuple[Kind, ...]:
        """Every kind of forward there is, the one that sends nothing first.

        Where a forward of whole bundles would send more than `largest` bytes, they are cut to the blocks that
        `rehearse` is given.
        """
        cut = self.bytes_per_forward > largest
        if cut:
            self._programs.add_cut()
        return tuple(
            CUT if kind == FULL and cut else kind for kind in self._programs.kinds if kind != CUT
        )

    def forget(self) -> None:
        """Count from one again: the forwards so far, all of which are over, were rehearsals."""
        self.forwards = 0
        self._programs.forget()
        self._program = self._programs.of(NOTHING, 0)

    def acquire(self, layer: int) -> None:
        """Return once layer `layer` (an ordinal) may be read and written; let a next one start.

        Calling it again while the layer is held does nothing, so that whatever touches a bundle first
        may call it. Raises OrderError out of turn, and TransferError, DivergenceError or whatever made
        the transfer fail; call `abort` then.
        """
        if layer == self._held:
            return
        in_turn = self._held is None and layer == self._next < self._layers
        if not (in_turn and self._active and not self._failed):
            raise OrderError(self._out_of_turn("acquire", layer))
        try:
            if self._agreed is not None and self._control.error is not None:
                raise self._control.error
            self._run_hook()
        except TransferError as error:
            raise type(error)(
                f"Forward {self.forwards} of rank {self.rank} failed while layer {layer} "
                f"({self.plan.bundles[layer].layer}) waited for its cache: {error}"
            ) from error
        self._held = layer

    def release(self, layer: int) -> None:
        """Say that layer `layer` was read and written for the last time in this forward.

        Raises OrderError if the layer is not the one held.
        """
        if not self._active or layer != self._held:
            raise OrderError(self._out_of_turn("release", layer))
        self._held = None
        self._next = layer + 1
        self._run_hook()

    def end(self) -> None:
        """End the forward. Raises CoverageError, naming them, if layers were not acquired or released.

        With a control stream of its own the comparison with the other ranks is awaited here at the latest,
        and raises as `acquire` does. The forward stays in flight after an error, and `abort` drains it.
        """
        if not self._active:
            raise OrderError(f"Rank {self.rank} ended a forward that was never begun.")
        if self._next != self._layers or self._held is not None:
            missing = [bundle.layer for bundle in self.plan.bundles[self._next :]]
            held = self._held is not None
            what = "was acquired but not released" if held else "never acquired its cache"
            raise CoverageError(
                f"Forward {self.forwards} of rank {self.rank} ended, but layer {missing[0]!r} {what} "
                f"({len(missing)} of {self._layers} layers are open); its attention class may have "
                "lost the KVPP hook."
            )
        if self._agreed is not None:
            self._agreed.synchronize(self._timeout)
        self._run_hook()
        self._record_end()
        self._finish(None)

    def abort(self, error: BaseException | None = None) -> None:
        """Give up the forward in flight and leave this rank able to begin the next one.

        The transfers that are left are still made, so that peers which go on with this forward are not
        left waiting. If the transfers themselves failed, or do not drain within the timeout, the group
        is unusable and the next `begin` says why. Does nothing if no forward is in flight.
        """
        if not self._active:
            return
        try:
            if self._agreed is not None:
                self._agreed.synchronize(self._timeout)
            if all(stream.error is None for stream in self._streams.values()):
                for hook in self._program.hooks[self._cursor :]:
                    for step in hook.drain:
                        step()
            for name in (TRANSFER_STREAM, COPY_STREAM, COMPUTE_STREAM):
                if name in self._streams:
                    self._streams[name].synchronize(self._timeout)
            for arm in self._program.rearm:
                arm()
            self._record_end()
        except Exception as failure:  # a failed drain must not hide the error that led here
            self._broken = failure
        self._finish(error)

    def synchronize(self) -> None:
        """Block the host until the device has run every forward that has ended; raises as `begin` does.

        On streams of the host nothing is ever outstanding.
        """
        for ended in self._programs.ended:
            ended.synchronize(self._timeout)

    def _run_hook(self) -> None:
        # The cursor moves first: a hook that fails halfway has failed in a transfer, and is not rerun.
        steps = self._program.hooks[self._cursor].steps
        self._cursor += 1
        self._failed = True
        for step in steps:
            step()
        self._failed = False

    def _finish(self, error: BaseException | None) -> None:
        self._active = False
        self._held = None
        if self._watch is not None and self._watched is not None:
            self._watch.ended(self._watched, error)
        self._watched = None

    def _next_number(self) -> int:
        """The number of a forward that may begin now, once nothing uses what it is about to use."""
        if self._active:
            raise ReentryError(
                f"Forward {self.forwards} of rank {self.rank} is still in flight; end or abort it "
                "before the next begin. Two micro-batches cannot share one KVPP group."
            )
        if self._broken is not None:
            raise TransferError(
                f"The KVPP group of rank {self.rank} is unusable since forward {self.forwards} "
                f"failed: {self._broken} Restart the engine."
            ) from self._broken
        number = self.forwards + 1
        self._programs.ended[number % GENERATIONS].synchronize(self._timeout)
        return number

    def _take_up(self, number: int, kind: Kind) -> None:
        """Let the hooks be those of a new forward."""
        self._program = self._programs.of(kind, number % GENERATIONS)
        self.forwards = number
        self._active = True
        self._cursor, self._next, self._held = 0, 0, None

    def _record_end(self) -> None:
        self._streams[COMPUTE_STREAM].record(self._programs.ended[self.forwards % GENERATIONS])

    def _out_of_turn(self, hook: str, layer: int) -> str:
        if not self._active:
            state = "no forward is in flight"
        elif self._failed:
            state = f"forward {self.forwards} has failed and must be aborted"
        elif self._held is not None:
            state = f"layer {self._held} is held and must be released first"
        elif self._next < self._layers:
            state = f"layer {self._next} is next"
        else:
            state = f"all {self._layers} layers are done"
        return f"Rank {self.rank} called {hook}({layer}) out of turn: {state}."

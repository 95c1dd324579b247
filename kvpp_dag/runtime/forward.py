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
import struct
import time
from typing import Any

from kvpp_dag.errors import (
    ConfigError,
    CoverageError,
    OrderError,
    ReentryError,
    TransferError,
)
from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Policy, lower
from kvpp_dag.runtime.accelerator import CurrentStream
from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.bind import BoundProgram, Call, bind
from kvpp_dag.runtime.compile import compile_forwards
from kvpp_dag.runtime.observer import Observer
from kvpp_dag.runtime.streams import E, Stream
from kvpp_dag.runtime.transport import Transport

GENERATIONS = 2
"""Bindings per kind of forward, so that two forwards in flight share no event."""


class ForwardPass:
    """The forwards of one rank, one at a time.

    All graphs are compiled and verified here, before anything runs: UnsoundGraphError if one has a
    race or a deadlock, ConfigError if `arena` and `transport` are not those of one rank.
    `control` is where the ranks compare their forwards before the first transfer: the transfer stream, if
    none is given, which on an accelerator would block the host. `observer` needs host streams.
    `skip_broadcasts` leaves every transfer out but keeps the events: the control that shows whether an
    output depends on the transfers. `timeout` (seconds) bounds an abort.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        transport: Transport,
        compute: Stream[E],
        transfer: Stream[E],
        control: Stream[Any] | None = None,
        policy: Policy = Policy.ON_ACQUIRE,
        observer: Observer | None = None,
        timeout: float = 60.0,
        skip_broadcasts: bool = False,
    ) -> None:
        self.plan = arena.plan
        self.rank = arena.rank
        if (transport.rank, transport.size) != (self.rank, self.plan.ranks):
            raise ConfigError(
                f"The arena is that of rank {self.rank} of {self.plan.ranks}, but the transport is that "
                f"of rank {transport.rank} of {transport.size}; both must belong to one rank."
            )
        if observer is not None and isinstance(compute, CurrentStream):
            raise ConfigError(
                "An observer was given, but the streams are those of an accelerator, where the host knows "
                "when work is submitted and not when it runs; trace on host streams."
            )
        self.graphs = compile_forwards(self.plan, self.rank, arena.num_blocks, policy)
        self.forwards = 0
        self.forwards_with_history = 0
        self._layers = len(self.plan.bundles)
        self._transport = transport
        self._compute: Stream[Any] = compute
        self._transfer: Stream[Any] = transfer
        self._control = control or transfer
        self._agreed = None if control is None else control.event("the comparison of the forwards")
        self._observer = observer
        self._timeout = timeout
        self._signature = bytes.fromhex(self.plan.layout_hash)
        self._sends = any(graph.broadcasts for graph in self.graphs) and not skip_broadcasts
        transfers = {
            node.id: self._transfer_of(arena, node.id, node.layer or 0, skip_broadcasts)
            for node in self.graphs[True].broadcasts
        }
        streams = {COMPUTE_STREAM: compute, TRANSFER_STREAM: transfer}
        self._bound: list[list[BoundProgram]] = [
            [
                bind(program, streams=streams, transfers=transfers, observer=observer)
                for _ in range(GENERATIONS)
            ]
            for program in map(lower, self.graphs)
        ]
        self._program = self._bound[False][0]
        self._active = False
        self._broken: BaseException | None = None
        self._cursor = 0
        self._held: int | None = None
        self._next = 0
        self._failed = False
        self._mark = 0

    @property
    def active(self) -> bool:
        """Whether a forward is in flight."""
        return self._active

    @property
    def signature(self) -> bytes:
        """16 bytes that all ranks must share before the first forward: layout, blocks, what is sent."""
        content = (self.plan.layout_hash, self.graphs[True].policy, self.bytes_per_forward)
        return hashlib.sha256(repr(content).encode()).digest()[:16]

    @property
    def broadcasts_per_forward(self) -> int:
        """Broadcasts of one forward with history, as sent (0 if they are skipped)."""
        return len(self.graphs[True].broadcasts) if self._sends else 0

    @property
    def bytes_per_forward(self) -> int:
        """Payload bytes that one forward with history broadcasts in this group."""
        return sum(n.bytes for n in self.graphs[True].broadcasts) if self._sends else 0

    def begin(self, *, history: bool) -> None:
        """Begin a forward; with `history` the first layers start to arrive.

        `history` is whether any real request has computed tokens; all ranks must say the same. Raises
        ReentryError while another forward is in flight, whose pending work is kept, and TransferError
        if an earlier failure left the group unusable. On an accelerator the host waits here until at most
        one forward is left on the compute stream, and learns of a device that failed or hangs.
        """
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
        program = self._bound[history][(self.forwards + 1) % GENERATIONS]
        program.ended.synchronize(self._timeout)  # its events must not be recorded before
        self._program = program
        self.forwards += 1
        self.forwards_with_history += history
        self._active = True
        self._cursor, self._next, self._held = 0, 0, None
        if self._observer is not None:
            self._mark = time.perf_counter_ns()
            self._observer.forward_began(self.forwards, self._program.graph, self._mark)
        if history and self._sends:
            self._control.launch(self._agree)
            if self._agreed is not None:
                self._control.record(self._agreed)
        self._run_hook()

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
        if self._observer is not None:
            self._computed("prologue" if layer == 0 else f"compute[{layer - 1}]")
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
        if self._observer is not None:
            self._mark = time.perf_counter_ns()

    def release(self, layer: int) -> None:
        """Say that layer `layer` was read and written for the last time in this forward.

        Raises OrderError if the layer is not the one held.
        """
        if not self._active or layer != self._held:
            raise OrderError(self._out_of_turn("release", layer))
        if self._observer is not None:
            self._computed(f"attend[{layer}]")
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
        if self._observer is not None and self._layers:
            self._computed(f"compute[{self._layers - 1}]")
        if self._agreed is not None:
            self._agreed.synchronize(self._timeout)
        self._run_hook()
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
            if self._transfer.error is None:
                for hook in self._program.hooks[self._cursor :]:
                    for step in hook.drain:
                        step()
            self._transfer.synchronize(self._timeout)
            self._compute.synchronize(self._timeout)
        except Exception as failure:  # a failed drain must not hide the error that led here
            self._broken = failure
        self._finish(error)

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
        self._compute.record(self._program.ended)
        if self._observer is not None:
            self._observer.forward_ended(time.perf_counter_ns(), error)

    def _computed(self, node: str) -> None:
        """Report that the engine ran compute node `node` since the last mark, and move the mark."""
        now = time.perf_counter_ns()
        if self._observer is not None:
            self._observer.node_ran(node, self._mark, now)
        self._mark = now

    def _agree(self) -> None:
        self._transport.agree(struct.pack("<8sq", self._signature, self.forwards))

    def _transfer_of(self, arena: Arena, node: str, ordinal: int, skip: bool) -> Call:
        if skip:
            return _nothing
        return self._transport.prepare(arena.cache(ordinal), self.plan.owners[ordinal])

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


def _nothing() -> None:
    """The transfer of a control run."""

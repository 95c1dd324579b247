"""Times that an accelerator takes itself, by timing events of its streams.

A device measures the milliseconds between two events, in single precision, so only short distances are
exact. Each forward therefore has a base event, whose own time follows from the base event of the forward
before; the first one is tied to the host's clock by waiting for a later one once.

A time that the device does not give, because it has failed or has not got there, is missing: it is marked so
in its cell, and never an error. What is wrong with the device is said by whoever needs the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvpp_dag.runtime.native import NativeEvent, NativeStream
from kvpp_dag.runtime.tape import MISSING, Stamp, Tape

ATTEMPTS = 8
"""How often the device's clock is compared with the host's."""


@dataclass(kw_only=True)
class Anchor:
    """The latest base event whose time is known, shared by all tapes of a device."""

    device: torch.device
    clock: Callable[[], int]
    event: torch.Event | None = None
    ns: int = 0

    def measure(self, event: torch.Event) -> int:
        """The time of a base event, which becomes the anchor. Raises RuntimeError, and keeps the anchor that it
        had, where the device has failed or has not reached the event.
        """
        if not event.query():
            raise RuntimeError("The base event of a forward has not been reached.")
        if self.event is None:
            self.ns = self._tie(event)
        else:
            self.ns += _between(self.event, event)
        self.event = event
        return self.ns

    def _tie(self, event: torch.Event) -> int:
        """The time of `event` on the host's clock, by a later event that the host waits for.

        The host may be slow to notice, so the quickest of some attempts counts.
        """
        stream = NativeStream(device=self.device)  # an idle one: nothing is queued before the event
        best, found = None, 0
        for _ in range(ATTEMPTS):
            tie = NativeEvent(self.device, enable_timing=True)
            before = self.clock()
            tie.record(stream)
            tie.synchronize()
            after = self.clock()
            if best is None or after - before < best:
                best, found = after - before, (before + after) // 2 - _between(event, tie)
        return found


class AcceleratorTimes:
    """The device's cells of one tape; see `DeviceTimes`."""

    def __init__(self, tape: Tape, anchor: Anchor) -> None:
        self._tape = tape
        self._anchor = anchor
        self._events: list[tuple[int, torch.Event]] = []
        self._bases = [NativeEvent(anchor.device, enable_timing=True) for _ in range(2)]
        self._based = False
        self._lost: set[int] = set()  # whose event could not even be recorded

    def stamp(self, cell: int) -> Stamp:
        """Records a timing event on the stream that is current where it is called."""
        event = NativeEvent(self._anchor.device, enable_timing=True)
        self._events.append((cell, event))
        times = self._tape.times

        def note() -> None:
            times[cell] = MISSING  # until it has been read
            try:
                if not self._based:
                    self._bases[0].record()
                    self._based = True
                event.record()
            except RuntimeError:
                self._lost.add(cell)

        return note

    def read(self, times: list[int]) -> None:
        """Put the nanoseconds of the events that were reached into their cells; the others stay MISSING."""
        if not self._based:
            return
        base = self._bases[0]
        try:
            start = self._anchor.measure(base)
        except RuntimeError:
            return
        for cell, event in self._events:
            if times[cell] == MISSING and cell not in self._lost:
                try:
                    times[cell] = start + _between(base, event)
                except RuntimeError:
                    continue
        self._bases.reverse()  # the anchor keeps this one until the next forward has been read
        self._based = False

    def clear(self) -> None:
        """Forget what was noted and not read."""
        self._based = False
        self._lost.clear()


def _between(first: torch.Event, second: torch.Event) -> int:
    """Nanoseconds from one event to another. Raises RuntimeError unless both have been reached."""
    return round(first.elapsed_time(second) * 1e6)

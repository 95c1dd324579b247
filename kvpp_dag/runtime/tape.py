"""Where one bound program leaves its times: a cell for each mark, written in place while it runs.

Cells are handed out while a program is bound, so that a running forward only stores numbers: nothing is
looked up or allocated. Each cell has one writer.
"""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol

from kvpp_dag.graph import Graph

Stamp = Callable[[], object]
"""Notes the time in a cell when it is called."""


MISSING = -1
"""In a cell whose stamp was passed and whose time is not known: not yet, or never, as the device does not tell."""

Taken = tuple[list[int], tuple[list[int], ...]]
"""Times by cell, and those of each line of stamps."""


class Mark(StrEnum):
    """What a cell's time is of: a node handed to its stream, started or ended, or a wait for an event."""

    SUBMITTED = "submitted"
    START = "start"
    END = "end"
    WAIT_START = "wait_start"
    WAIT_END = "wait_end"


class DeviceTimes(Protocol):
    """Times that a device takes: given out as stamps, and read once the device has passed them."""

    def stamp(self, cell: int) -> Stamp:
        """A stamp to be called where work of the device is submitted."""

    def read(self, times: list[int]) -> None:
        """Put what the device has measured into its cells, in nanoseconds of the tape's clock.

        A time that the device does not give leaves MISSING in its cell, and raises nothing.
        """

    def clear(self) -> None:
        """Forget what was noted and not read."""


class Line:
    """The stamps of one host stream: their cells, in order, and the times noted so far.

    Where a stamp would be a call of its own, `append(clock())` is what it does. A pair of cells are the ends of a
    wait: one time is noted if it took none, else its start, negated, and then its end.
    """

    __slots__ = ("append", "cells", "clock", "note", "times")

    def __init__(self, clock: Callable[[], int]) -> None:
        self.cells: list[int | tuple[int, int]] = []
        self.times: list[int] = []
        self.clock = clock
        self.append = append = self.times.append

        def note() -> None:
            append(clock())

        self.note: Stamp = note


class Tape:
    """The times of one binding of `graph`; 0 where nothing was noted.

    `clock` gives nanoseconds. `device`, if the program runs on one, supplies the cells of its streams, and
    keeps in `shared` what all tapes of one observer have in common. `blocks` is how many blocks a broadcast
    of `graph` stands for; a forward may send fewer.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        shared: dict[object, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.clock = clock
        self.shared = {} if shared is None else shared
        self.cells: dict[tuple[Mark, str], int] = {}
        self.times: list[int] = []
        self._lines: dict[str, Line] = {}
        self.device: DeviceTimes | None = None
        self.blocks = 0
        self._blank: list[int] = []

    def cell(self, mark: Mark, node: str) -> int:
        """A new cell for a mark of `node`."""
        self.cells[mark, node] = len(self.times)
        self.times.append(0)
        self._blank.append(0)
        return len(self.times) - 1

    def alias(self, mark: Mark, node: str, cell: int) -> None:
        """Let a mark share a cell with one that is noted at the same moment."""
        self.cells[mark, node] = cell

    def line(self, stream: str, cell: int | tuple[int, int]) -> Line:
        """The line of a host stream, to which the times of `cell` are added after those of the cells before.

        They may stop anywhere, but none may be left out between two others.
        """
        if stream not in self._lines:
            self._lines[stream] = Line(self.clock)
        line = self._lines[stream]
        line.cells.append(cell)
        return line

    def line_stamp(self, stream: str, cell: int) -> Stamp:
        """A call that notes the clock in `cell`, of a host stream whose stamps are called in the order of these.

        All stamps of a stream are one and the same call, which adds to a list: what runs every layer stays in
        the processor's cache.
        """
        return self.line(stream, cell).note

    def stamp(self, cell: int) -> Stamp:
        """A call that notes the clock in `cell`, whatever else is noted."""
        times, clock = self.times, self.clock

        def note() -> None:
            times[cell] = clock()

        return note

    def clear(self) -> None:
        """Forget all times, before the program runs again."""
        self.times[:] = self._blank
        for line in self._lines.values():
            line.times.clear()
        if self.device is not None:
            self.device.clear()

    def take(self) -> Taken:
        """A copy of what was noted, to be resolved later; what a device has not passed yet stays MISSING."""
        if self.device is not None:
            self.device.read(self.times)
        return self.peek()

    def peek(self) -> Taken:
        """The same of a forward in flight: what the host has noted so far."""
        return self.times.copy(), tuple(line.times.copy() for line in self._lines.values())

    def resolve(self, taken: Taken) -> list[int]:
        """The times by cell of what was taken."""
        times = taken[0].copy()
        for line, noted in zip(self._lines.values(), taken[1], strict=True):
            rest = iter(noted)
            for cell, at in zip(line.cells, rest, strict=False):
                if isinstance(cell, int):
                    times[cell] = at
                else:
                    start, end = cell
                    times[start] = abs(at)
                    times[end] = at if at > 0 else next(rest, 0)
        return times

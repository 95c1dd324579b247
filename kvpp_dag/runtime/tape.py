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
        """Put what the device has measured into its cells, in nanoseconds of the tape's clock."""


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

    def stamp(self, cell: int) -> Stamp:
        """A call that notes the clock in `cell`."""
        times, clock = self.times, self.clock

        def note() -> None:
            times[cell] = clock()

        return note

    def clear(self) -> None:
        """Forget all times, before the program runs again."""
        self.times[:] = self._blank

    def read(self) -> list[int]:
        """A copy of the times, with those of the device; it must have passed the program's end."""
        if self.device is not None:
            self.device.read(self.times)
        return self.times.copy()

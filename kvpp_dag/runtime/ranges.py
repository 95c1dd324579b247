"""Ranges in a user's own profile: `kvpp.broadcast.layer_12` beside the kernels, under the names of our traces.

`torch.profiler.record_function` on every device, and NVTX ranges as well where torch has CUDA (not yet run
there). A range is around what the host submits, or what its worker runs; a CPU profile shows the worker's if
it is taken of all threads.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

Call = Callable[[], object]


class Range:
    """A range that is opened and closed by different calls, one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nvtx: Any = torch.cuda.nvtx if torch.cuda.is_available() else None
        self._open: tuple[record_function, Any] | None = None

    def start(self) -> None:
        """Open it; one that an aborted forward has left open is closed first."""
        self.stop()
        record = record_function(self._name)
        record.__enter__()  # type: ignore[no-untyped-call]
        self._open = record, self._nvtx.range_start(self._name) if self._nvtx else None

    def stop(self) -> None:
        """Close it, if it is open."""
        if self._open is None:
            return
        record, handle = self._open
        self._open = None
        if handle is not None:
            self._nvtx.range_end(handle)
        record.__exit__(None, None, None)


def ranged(name: str, call: Call) -> Call:
    """`call`, marked as `name`."""
    mark = Range(name)

    def run() -> None:
        mark.start()
        try:
            call()
        finally:
            mark.stop()

    return run

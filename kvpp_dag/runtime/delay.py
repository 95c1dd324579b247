"""Work that keeps a stream busy for about a given time, on any device: what races has to be given time to win."""

import time
from math import ceil
from typing import Any

import torch

from kvpp_dag.runtime.streams import Stream

_COLUMNS, _FEWEST, _MOST = 16, 256, 1 << 16
"""Shape of what is added up: along so few columns a device does little at a time, and one call takes long."""

_LOOKS = 3
"""How often a time is taken."""


class Delay:
    """Called on a stream, it submits work that takes about `seconds` there; measured once, on `compute`.

    One call of the device is preferred to several, since a host that is still submitting a delay submits
    nothing behind it. The numbers are zeros and stay so, so that several streams may be delayed at a time.
    """

    def __init__(self, device: torch.device, compute: Stream[Any], *, timeout: float) -> None:
        self._cells = torch.zeros(_MOST, _COLUMNS, dtype=torch.int32, device=device)
        self._compute = compute
        self._timeout = timeout
        self._rows, self._repeats = _FEWEST, 1
        self._once()  # the first call may load what it runs

    def last(self, seconds: float) -> None:
        """Take about that long from now on."""
        self._rows, self._repeats = _FEWEST, 1
        taken = self._quickest()
        while taken < seconds and self._rows < _MOST:
            self._rows *= 2
            taken = self._quickest()
        self._repeats = ceil(max(1.0, seconds / taken))

    def double(self) -> None:
        """Take twice as long from now on."""
        self._repeats *= 2

    def __call__(self) -> None:
        """Submit the work."""
        for _ in range(self._repeats):
            self._cells[: self._rows].cumsum_(0)

    def _quickest(self) -> float:
        """The shortest of some looks: on a busy host one alone takes long for another reason than the work."""
        return min(self._once() for _ in range(_LOOKS))

    def _once(self) -> float:
        """Seconds that the work takes now."""
        started = time.perf_counter()
        self._compute.launch(self)
        self._compute.synchronize(self._timeout)
        return time.perf_counter() - started

"""The accelerator that is checked, and how to keep it busy for a known time."""

from math import ceil

import torch

from kvpp_dag.errors import ConfigError
from kvpp_dag.runtime import CurrentStream, find_accelerator
from kvpp_dag.runtime.delay import Delay
from kvpp_dag.runtime.native import NativeEvent, NativeStream
from kvpp_dag.runtime.vendors import VENDORS

UNIT = 1e-3
"""Seconds of the work of which delays consist."""

SHORTEST = 1e-5
"""Seconds below which a measurement of one unit is not believed."""

PATIENCE = 60.0


class Device:
    """A torch device, and what a check does to it."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device
        current = CurrentStream("the current stream", torch_device, timeout=PATIENCE)
        # Measured here, since it waits for the device, which nobody may do within a forward; on a stream like those
        # that are delayed, and by the shortest of several: what else the machine does only makes them longer.
        with self.stream():
            self._unit = Delay(torch_device, current, timeout=PATIENCE)
            self._unit.last(UNIT)
            self._seconds = min(self._measure() for _ in range(5))

    def stream(self) -> torch.Stream:
        """A new stream."""
        return NativeStream(device=self.torch)

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long, on the device."""
        for _ in range(ceil(seconds / self._seconds)):
            self._unit()

    def _measure(self) -> float:
        """Seconds that the device takes over one unit."""
        start, end = (NativeEvent(self.torch, enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            self._unit()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) / 1000 / 4, SHORTEST)


def open_device(kind: str | None = None) -> Device:
    """The accelerator that torch finds, of type `kind` if one is given.

    Raises ConfigError if there is none, if it is of another type, or if KVPP does not know its type.
    """
    known = ", ".join(VENDORS)
    if kind is not None and kind not in VENDORS:
        raise ConfigError(f"There is no kind of device {kind!r}; expected one of {known}.")
    found = find_accelerator()
    if found is None:
        raise ConfigError(
            f"torch {torch.__version__} finds no accelerator on this machine, so there is nothing to check; "
            "run this where one is, with torch built for it."
        )
    if found.type not in VENDORS:
        raise ConfigError(f"torch finds a device of type {found.type!r}; KVPP knows {known}.")
    if kind not in (None, found.type):
        raise ConfigError(
            f"torch finds no {kind} on this machine, but {found.type}; check that instead."
        )
    return Device(torch.device(found.type, torch.accelerator.current_device_index()))

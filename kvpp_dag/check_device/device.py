"""The accelerator that is checked, and how to keep it busy for a known time."""

import torch

from kvpp_dag.errors import ConfigError
from kvpp_dag.runtime import find_accelerator
from kvpp_dag.runtime.native import NativeEvent, NativeStream
from kvpp_dag.runtime.vendors import VENDORS

SMALLEST, LARGEST = 64, 4096
"""Rows of the square matrices whose products pass the time."""

SHORTEST_ROUND = 200e-6
"""Seconds that one product takes at least: shorter ones would wait for the host that submits them."""


class Device:
    """A torch device, and what a check does to it."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device
        self._calibrate()  # here, since it waits for the device, which nobody may do within a forward

    def stream(self) -> torch.Stream:
        """A new stream."""
        return NativeStream(device=self.torch)

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long, on the device."""
        self._spin(max(1, round(seconds / self._seconds_per_round)))

    def _spin(self, rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(self._factor, self._factor, out=self._product)

    def _calibrate(self) -> None:
        """Choose products that take long enough on this device, and no longer; what they compute does not matter."""
        size = SMALLEST
        while True:
            self._factor = torch.ones(size, size, device=self.torch)
            self._product = torch.empty_like(self._factor)
            self._seconds_per_round = min(self._time(20) for _ in range(4))
            if self._seconds_per_round >= SHORTEST_ROUND or size == LARGEST:
                return
            size *= 2

    def _time(self, rounds: int) -> float:
        start, end = (NativeEvent(self.torch, enable_timing=True) for _ in range(2))
        start.record()
        self._spin(rounds)
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) / 1000 / rounds, 1e-6)


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

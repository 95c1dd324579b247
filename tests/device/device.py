"""The accelerator that the tests here run on: a real one where there is one, else the test device.

The test device is `cpp/`, built once and loaded into this process; torch then knows it as `kvppdev`.
"""

from pathlib import Path

import torch

from kvpp_dag import check_device
from kvpp_dag.runtime import find_accelerator
from tests.device.build import NAME, build_test_device, load_test_device

STALL = 2.0
"""Seconds for which a real device is kept busy where the test device is held until it is let go."""


class Device(check_device.Device):
    """A torch device, and what tests do to it. `simulated` says that it is the test device.

    `delay` and `stall` are submitted to the current stream.
    """

    def __init__(self, torch_device: torch.device, *, simulated: bool) -> None:
        super().__init__(torch_device)
        self.simulated = simulated

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for so long; the test device without the processor."""
        if self.simulated:
            torch.ops.kvpp_device.delay(seconds)
        else:
            super().delay(seconds)

    def stall(self) -> None:
        """Keep the current stream from going on until `resume`, or for STALL seconds on a real device."""
        if self.simulated:
            torch.ops.kvpp_device.hold()
        else:
            self.delay(STALL)

    def resume(self) -> None:
        if self.simulated:
            torch.ops.kvpp_device.let_go()

    def allocations(self) -> int:
        """How often memory was allocated so far."""
        if self.simulated:
            return torch.ops.kvpp_device.allocations()
        return torch.accelerator.memory_stats()["allocation.all.allocated"]


def open_device(cache: Path | None) -> Device:
    """The accelerator of this machine, or the test device, built under `cache`; one or the other."""
    if (real := find_accelerator()) is not None and real.type != NAME:
        return Device(torch.device(real.type, torch.accelerator.current_device_index()), simulated=False)
    assert cache is not None
    load_test_device(build_test_device(cache))
    return Device(torch.device(NAME, 0), simulated=True)

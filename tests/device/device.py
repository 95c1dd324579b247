"""The accelerator that the tests here run on: a real one where there is one, else the test device.

The test device is `cpp/`, built once and loaded into this process; torch then knows it as `kvppdev`.
"""

from pathlib import Path

import torch

from kvpp_dag.runtime import find_accelerator
from tests.device.build import NAME, build_test_device, load_test_device

STALL = 2.0
"""Seconds for which a real device is kept busy where the test device is held until it is let go."""


class Device:
    """A torch device, and what tests do to it. `simulated` says that it is the test device.

    `delay`, `stall` and `fail` are submitted to the current stream.
    """

    def __init__(self, torch_device: torch.device, *, simulated: bool) -> None:
        self.torch = torch_device
        self.simulated = simulated
        self._work = None if simulated else torch.ones(1024, 1024, device=torch_device)
        self._rounds_per_second = 0.0 if simulated else self._calibrate()

    def stream(self) -> torch.Stream:
        return torch.Stream(device=self.torch)

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for about so long."""
        if self.simulated:
            torch.ops.kvpp_device.delay(seconds)
        else:
            self._spin(int(seconds * self._rounds_per_second))

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

    def _spin(self, rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(self._work, self._work, out=self._result)

    def _calibrate(self) -> float:
        self._result = torch.empty_like(self._work)
        start, end = (torch.Event(self.torch, enable_timing=True) for _ in range(2))
        self._spin(20)
        start.record()
        self._spin(200)
        end.record()
        torch.accelerator.synchronize()
        return 200 / (start.elapsed_time(end) / 1000)


def open_device(cache: Path | None) -> Device:
    """The accelerator of this machine, or the test device, built under `cache`; one or the other."""
    if (real := find_accelerator()) is not None and real.type != NAME:
        return Device(torch.device(real.type, torch.accelerator.current_device_index()), simulated=False)
    assert cache is not None
    load_test_device(build_test_device(cache))
    return Device(torch.device(NAME, 0), simulated=True)

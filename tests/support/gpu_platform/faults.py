"""Faults of KVPP on the test device, from outside of it: see `Faults`. In each worker the last ones act."""

import random
from typing import Any

import torch

from kvpp_dag.graph import COMPUTE_STREAM
from kvpp_dag.runtime import AcceleratorStream, CurrentStream
from kvpp_dag.runtime.payload import WayChooser
from tests.support import payloads
from tests.support.gpu_platform import Faults


class _Active:
    """The faults of this worker, and the random numbers of each stream that is delayed."""

    def __init__(self, faults: Faults, rank: int) -> None:
        self.faults = faults
        self.random = {name: random.Random(f"{faults.seed} {name} {rank}") for name in faults.delays}

    def delay(self, stream: str) -> None:
        """Delay the current stream of the device, if `stream` is to be."""
        if stream in self.random:
            torch.ops.kvpp_device.delay(self.random[stream].random() * self.faults.delays[stream])

    def drops(self, stream: str, event: str) -> bool:
        """Whether `stream` ignores that it is told to wait for `event`."""
        return stream == self.faults.dropped and event.startswith(self.faults.dropped_events)


def activate(faults: Faults, *, rank: int) -> None:
    """Let `faults` act from here on, in place of those before; each rank has delays of its own."""
    _active[:] = [_Active(faults, rank)]
    WayChooser.choose = _choose  # type: ignore[method-assign]
    if faults.way is not None:
        getattr(payloads, faults.way)(None)


def install() -> None:
    """Put what `activate` controls between KVPP's streams and the device: once, before any stream is made."""
    activate(Faults(), rank=0)
    for kind in (CurrentStream, AcceleratorStream):
        _install_waits(kind)
    launch, record = AcceleratorStream.launch, CurrentStream.record

    def launch_late(self: Any, work: Any) -> None:
        launch(self, lambda: _active[0].delay(self.name))
        launch(self, work)

    def record_late(self: Any, event: Any) -> None:
        _active[0].delay(COMPUTE_STREAM)
        record(self, event)

    AcceleratorStream.launch = launch_late  # type: ignore[method-assign]
    CurrentStream.record = record_late  # type: ignore[method-assign]


def _install_waits(kind: Any) -> None:
    wait = kind.wait

    def wait_unless_dropped(self: Any, event: Any) -> None:
        if not _active[0].drops(self.name, event.name):
            wait(self, event)
        elif getattr(self, "_host_waits", False):  # what the host does itself, it still does
            event.synchronize(self._timeout)

    kind.wait = wait_unless_dropped


_choose = WayChooser.choose
_active: list[_Active] = []

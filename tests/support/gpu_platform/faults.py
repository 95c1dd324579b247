"""Faults of KVPP on the test device, from outside of it: see `Faults`. They act in one worker, for its life."""

import random
from typing import Any

import torch

from kvpp_dag.graph import COMPUTE_STREAM
from kvpp_dag.runtime import AcceleratorStream, CurrentStream
from tests.support import payloads
from tests.support.gpu_platform import FAULTS, Faults


def apply(additional_config: Any) -> None:
    """Change KVPP's streams as the configuration asks, before any of them is made."""
    faults = Faults(**additional_config.get(FAULTS, {}))
    for number, (name, seconds) in enumerate(sorted(faults.delays.items())):
        _delay(name, seconds, random.Random(100 * faults.seed + number))
    if faults.dropped is not None:
        _drop_waits(faults.dropped, faults.dropped_events)
    if faults.way is not None:
        getattr(payloads, faults.way)(None)


def _delay(name: str, seconds: float, draw: random.Random) -> None:
    """Delay work of the stream `name`: before each launch, or before each record on the compute stream."""
    if name == COMPUTE_STREAM:
        record = CurrentStream.record

        def slow_record(self: Any, event: Any) -> None:
            torch.ops.kvpp_device.delay(draw.random() * seconds)
            record(self, event)

        CurrentStream.record = slow_record  # type: ignore[method-assign]
        return
    launch = AcceleratorStream.launch

    def slow_launch(self: Any, work: Any) -> None:
        if self.name == name:
            launch(self, lambda: torch.ops.kvpp_device.delay(draw.random() * seconds))
        launch(self, work)

    AcceleratorStream.launch = slow_launch  # type: ignore[method-assign]


def _drop_waits(name: str, prefix: str) -> None:
    """Let the stream `name` go on where it is told to wait for an event whose name begins with `prefix`.

    Where the host waits as well, it still does.
    """
    kind: Any = CurrentStream if name == COMPUTE_STREAM else AcceleratorStream
    wait = kind.wait

    def wait_unless_dropped(self: Any, event: Any) -> None:
        if self.name != name or not event.name.startswith(prefix):
            wait(self, event)
        elif getattr(self, "_host_waits", False):
            event.synchronize(self._timeout)

    kind.wait = wait_unless_dropped

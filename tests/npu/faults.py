"""What tests do to KVPP's streams on the stand-in device: random delays, and waits that are left out.

They are put in place in the process that workers are forked from, before an engine is made.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from kvpp_dag.graph import COPY_STREAM, TRANSFER_STREAM
from kvpp_dag.runtime.accelerator import AcceleratorStream, CurrentStream

LONGEST_DELAY = 4e-3
"""Seconds; a layer of the test's models takes about one millisecond."""


@contextmanager
def present(names: Sequence[str]) -> Iterator[None]:
    """With the faults of these names."""
    with ExitStack() as stack:
        for name in names:
            for change in FAULTS[name]():
                stack.enter_context(change)
        yield


def delays() -> Iterator[Any]:
    """Every stream of KVPP is now and then late."""
    numbers = random.Random(11)

    def delay() -> None:
        torch.ops.kvpp_device.delay(numbers.random() ** 2 * LONGEST_DELAY)

    launch, wait = AcceleratorStream.launch, CurrentStream.wait

    def launch_late(self: AcceleratorStream, work: Callable[[], object]) -> None:
        def late() -> None:
            delay()
            work()

        launch(self, late)

    def wait_and_delay(self: CurrentStream, event: Any) -> None:
        wait(self, event)
        delay()

    yield mock.patch.object(AcceleratorStream, "launch", launch_late)
    yield mock.patch.object(CurrentStream, "wait", wait_and_delay)


def no_waits_of_compute() -> Iterator[Any]:
    """Attention starts before its caches are there."""
    yield mock.patch.object(CurrentStream, "wait", return_value=None)


def no_waits_of(stream: str) -> Callable[[], Iterator[Any]]:
    """A side stream does not wait for anything."""

    def leave_out() -> Iterator[Any]:
        wait = AcceleratorStream.wait

        def wait_elsewhere(self: AcceleratorStream, event: Any) -> None:
            if self.name != stream:
                wait(self, event)

        yield mock.patch.object(AcceleratorStream, "wait", wait_elsewhere)

    return leave_out


def no_acquire(implementation: str, *methods: str) -> Callable[[], Iterator[Any]]:
    """The layers of one implementation are not hooked at `methods`."""

    def leave_out() -> Iterator[Any]:
        from dataclasses import replace

        from kvpp_vllm.ascend import hooks

        (name,) = (known for known in hooks.IMPLEMENTATIONS if known.endswith(implementation))
        known = hooks.IMPLEMENTATIONS[name]
        kept = tuple(method for method in known.acquire if method not in methods)
        assert kept != known.acquire
        yield mock.patch.dict(hooks.IMPLEMENTATIONS, {name: replace(known, acquire=kept)})

    return leave_out


FAULTS: dict[str, Callable[[], Iterator[Any]]] = {
    "delays": delays,
    "no waits of compute": no_waits_of_compute,
    "no waits of transfers": no_waits_of(TRANSFER_STREAM),
    "no waits of copies": no_waits_of(COPY_STREAM),
    "no acquire of decodes": no_acquire("AscendMLAImpl", "exec_kv_decode"),
    "no acquire of prefills": no_acquire("AscendMLAImpl", "exec_kv_prefill"),
}

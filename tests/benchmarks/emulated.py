"""An emulated DMA engine, and what the best possible schedule would take on it.

A transfer is a sleep on the thread of the transfer stream: it needs no core, as a DMA engine needs none, and the stream
is real, so that its queue, hand-overs and wake-ups are measured.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

BYTES_PER_SECOND = 1e6
"""A byte is a microsecond: a bundle's size is its duration."""

PROMPT = 0.3e-3
"""Seconds within which an item that follows another one had been waiting for it."""


class Engine:
    """A queue of work that takes time and no core.

    The kernel ends a sleep late, by 0.1 ms on an idle machine and by more beside other load. An item that comes
    promptly after such a sleep had been waiting, and a device would have begun it on time: it begins when the
    item before it should have ended. Whatever else is late, hand-overs between threads above all, stays measured.
    """

    def __init__(self) -> None:
        self._due = self._woken = 0.0

    def work(self, seconds: float) -> None:
        """Return when `seconds` of work are done."""
        now = time.perf_counter()
        began = self._due if now - self._woken < PROMPT else now
        self._due = began + seconds
        time.sleep(max(0.0, self._due - now))
        self._woken = time.perf_counter()


class SleepingTransport:
    """One rank of a group whose broadcasts take the time that their bytes need, and move nothing."""

    def __init__(self, size: int = 2) -> None:
        self.rank = 0
        self.size = size
        self._engine = Engine()

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """Work for as long as `view` has bytes."""
        return partial(self._engine.work, view.numel() / BYTES_PER_SECOND)

    def agree(self, token: bytes) -> None:
        """There is nobody to disagree."""


def ideal(transfers: Sequence[float], computes: Sequence[float]) -> float:
    """The least time of a forward: transfers back to back from its begin, a layer's compute after its own transfer.

    This is the makespan of a flow shop of two machines in a fixed order, with as many slots as anybody likes: no
    scheduler can be faster. For equal layers it is Tb + (L - 1) max(Tb, Tc) + Tc.
    """
    arrived = computed = 0.0
    for transfer, compute in zip(transfers, computes, strict=True):
        arrived += transfer
        computed = max(computed, arrived) + compute
    return computed


def predicted(
    transfers: Sequence[float],
    attends: Sequence[float],
    rests: Sequence[float],
    *,
    depth: int,
    on_release: bool,
) -> float:
    """The time of a forward under a policy, if nothing but transfers and compute took any.

    The transfer of layer i may start when the engine asks for layer i - depth (`on_acquire`), or when layer
    i - depth - 1 has attended (`on_release`), and does when the one before it is done.
    """
    opened = [0.0] * (depth + on_release)  # when each transfer may start; these start with the forward
    arrived = computed = 0.0
    for layer, (attend, rest) in enumerate(zip(attends, rests, strict=True)):
        if not on_release:
            opened.append(computed)
        arrived = max(arrived, opened[layer]) + transfers[layer]
        attended = max(computed, arrived) + attend
        if on_release:
            opened.append(attended)
        computed = attended + rest
    return computed

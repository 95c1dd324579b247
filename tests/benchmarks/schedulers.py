"""Schedulers to compare: those of other systems, rebuilt from descriptions of what they do, behind our hooks.

Each takes one ready-made transfer per layer and two slots, as `ForwardPass` does at depth 1. They keep no account of
order or failures, which is in their favour.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from kvpp_dag.runtime import CpuStream, HostEvent
from tests.benchmarks.emulated import Engine

Transfer = Callable[[], object]
TIMEOUT = 60.0


class Scheduler(Protocol):
    """What a model's forward calls around its layers."""

    def begin(self, *, history: bool) -> None: ...
    def acquire(self, layer: int) -> None: ...
    def release(self, layer: int) -> None: ...
    def end(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Seconds of one layer's compute: in its attention, which reads the cache, and after it."""

    attend: float
    rest: float

    @property
    def seconds(self) -> float:
        """Of the whole layer."""
        return self.attend + self.rest


def run_forward(scheduler: Scheduler, layers: Sequence[Compute]) -> None:
    """One forward of a model whose compute is a sleep, as on a device that needs no host."""
    compute = Engine()
    scheduler.begin(history=True)
    for number, layer in enumerate(layers):
        scheduler.acquire(number)
        compute.work(layer.attend)
        scheduler.release(number)
        compute.work(layer.rest)
    scheduler.end()


class Serial:
    """Every layer fetches its cache when it needs it: nothing overlaps."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers

    def begin(self, *, history: bool) -> None:
        """Nothing to do."""

    def acquire(self, layer: int) -> None:
        """Transfer now."""
        self._transfers[layer]()

    def release(self, layer: int) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""


class NextFromHook(Serial):
    """The first transfer starts with the forward; a hook waits for its own and then queues the next one."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        super().__init__(transfers)
        self._stream = CpuStream("transfer", timeout=TIMEOUT)
        self._events = [self._stream.event(f"transfer {i}") for i in range(len(transfers))]

    def begin(self, *, history: bool) -> None:
        """Queue the first."""
        self._queue(0)

    def acquire(self, layer: int) -> None:
        """Wait for this layer's, then queue the next."""
        self._events[layer].synchronize(TIMEOUT)
        self._queue(layer + 1)

    def _queue(self, layer: int) -> None:
        if layer < len(self._transfers):
            self._stream.launch(self._transfers[layer])
            self._stream.record(self._events[layer])


class FirstAtFirstUse(NextFromHook):
    """As `NextFromHook`, but the first transfer too starts where its layer asks for it."""

    def begin(self, *, history: bool) -> None:
        """Nothing is known to be needed yet."""

    def acquire(self, layer: int) -> None:
        """Queue this layer's if it is the first, wait for it, then queue the next."""
        if layer == 0:
            self._queue(0)
        super().acquire(layer)


class FuturePool(NextFromHook):
    """A thread pool queues transfers; a hook blocks on the future, then on the event, then asks for the next."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        super().__init__(transfers)
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._futures: list[Future[HostEvent]] = []

    def begin(self, *, history: bool) -> None:
        """Ask for the first."""
        self._futures = [self._pool.submit(self._queue_and_tell, 0)]

    def acquire(self, layer: int) -> None:
        """Block on the future and on the event that it gives, then ask for the next."""
        self._futures[layer].result(TIMEOUT).synchronize(TIMEOUT)
        if layer + 1 < len(self._transfers):
            self._futures.append(self._pool.submit(self._queue_and_tell, layer + 1))

    def _queue_and_tell(self, layer: int) -> HostEvent:
        self._queue(layer)
        return self._events[layer]


BASELINES: dict[str, Callable[[Sequence[Transfer]], Scheduler]] = {
    "serial": Serial,
    "thread-pool future": FuturePool,
    "next from the hook": NextFromHook,
    "first at first use": FirstAtFirstUse,
}

"""Streams and events of the host: `cpu` (a FIFO worker thread) and `host` (the calling thread).

A stream runs what it is given in order. An event marks a point of a stream; another stream, or the
host, can wait for it. Once work on a stream has failed, the stream skips all later work, and every
event recorded on it from then on carries the error to whoever waits.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from kvpp_dag.errors import TransferError

Work = Callable[[], object]


class Event:
    """A point of a host stream. Reusable once every wait on its last record has returned."""

    __slots__ = ("_done", "error", "name", "waiter")

    def __init__(self, name: str = "event") -> None:
        self.name = name
        self.error: BaseException | None = None
        self.waiter = _Wait(self)
        self._done = threading.Event()
        self._done.set()

    def reset(self) -> None:
        """Forget the last record; called where the next one is submitted."""
        self.error = None
        self._done.clear()

    def settle(self, error: BaseException | None) -> None:
        """Mark the point as reached; `error` is what made its stream fail before it."""
        self.error = error
        self._done.set()

    def query(self) -> bool:
        """Whether the point was reached, without waiting."""
        return self._done.is_set()

    def synchronize(self, timeout: float) -> None:
        """Block the host until the point is reached.

        Raises the stream's error if it failed before this point, and TransferError after `timeout`
        seconds.
        """
        if not self._done.is_set() and not self._done.wait(timeout):
            raise TransferError(
                f"{self.name} was not reached within {timeout:g} s; a peer may have died or run "
                "another forward. See the logs of the other ranks of this group."
            )
        if self.error is not None:
            raise self.error


class _Wait:
    """A queue item that makes a stream wait for an event; one per event, so that none is allocated."""

    __slots__ = ("event",)

    def __init__(self, event: Event) -> None:
        self.event = event


class Stream(Protocol):
    """A FIFO queue of work."""

    name: str

    @property
    def error(self) -> BaseException | None:
        """What made the stream fail, or None."""

    def launch(self, work: Work) -> None:
        """Run `work` after everything submitted before."""

    def record(self, event: Event) -> None:
        """Let `event` be reached once everything submitted before has run."""

    def wait(self, event: Event) -> None:
        """Let nothing submitted later run before `event` is reached."""

    def synchronize(self, timeout: float) -> None:
        """Block the host until everything submitted so far has run; raise the stream's error."""


class HostStream:
    """The calling thread as a stream: the compute stream of an engine that computes on the CPU.

    Work runs at once and a wait blocks the caller for at most `timeout` seconds.
    """

    error = None

    def __init__(self, name: str, *, timeout: float) -> None:
        self.name = name
        self._timeout = timeout

    def launch(self, work: Work) -> None:
        """Run `work` now."""
        work()

    def record(self, event: Event) -> None:
        """Reach `event` now: everything before it has run already."""
        event.reset()
        event.settle(None)

    def wait(self, event: Event) -> None:
        """Block until `event` is reached; raises as `Event.synchronize` does."""
        event.synchronize(self._timeout)

    def synchronize(self, timeout: float) -> None:
        """Nothing is ever outstanding."""


class CpuStream:
    """A FIFO worker thread. A wait inside the stream gives up after `timeout` seconds."""

    def __init__(self, name: str, *, timeout: float) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._timeout = timeout
        self._queue: SimpleQueue[Work | Event | _Wait | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kvpp-{name}", daemon=True)
        self._thread.start()

    def launch(self, work: Work) -> None:
        """Run `work` on the worker after everything submitted before."""
        self._queue.put(work)

    def record(self, event: Event) -> None:
        """Let `event` be reached once everything submitted before has run."""
        event.reset()
        self._queue.put(event)

    def wait(self, event: Event) -> None:
        """Let nothing submitted later run before `event` is reached."""
        self._queue.put(event.waiter)

    def synchronize(self, timeout: float) -> None:
        """Block until the worker is idle. Raises its error, or TransferError after `timeout` s."""
        event = Event(f"the end of stream {self.name!r}")
        self.record(event)
        event.synchronize(timeout)

    def close(self) -> None:
        """End the worker once it has run what was submitted; a worker that hangs is left behind."""
        self._queue.put(None)
        self._thread.join(self._timeout)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.settle(self.error)
            elif self.error is None:
                try:
                    if isinstance(item, _Wait):
                        item.event.synchronize(self._timeout)
                    else:
                        item()
                except BaseException as error:  # whatever it was, the waiting thread must see it
                    self.error = error

"""What a stream and an event are, and those of the host: a FIFO worker thread, and the calling thread.

A stream runs what it is given in order. An event marks a point of a stream; another stream, or the
host, can wait for it. Once work on a stream has failed, the stream skips all later work, and every
event recorded on it from then on carries the error to whoever waits.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeVar

from kvpp_dag.errors import TransferError
from kvpp_dag.runtime.tape import Line, Stamp, Tape

Work = Callable[[], object]


class Event(Protocol):
    """A point of a stream. Reusable once every wait on its last record has returned."""

    name: str

    def query(self) -> bool:
        """Whether the point was reached, without waiting."""

    def synchronize(self, timeout: float) -> None:
        """Block the host until the point is reached.

        Raises the stream's error if it failed before this point, and TransferError after `timeout`
        seconds.
        """


E = TypeVar("E", bound=Event)


class Stream(Protocol[E]):
    """A FIFO queue of work, whose events are of kind `E`."""

    name: str

    @property
    def error(self) -> BaseException | None:
        """What made the stream fail, or None."""

    def event(self, name: str) -> E:
        """A new event that this stream, and others of its kind, can record and wait for."""

    def launch(self, work: Work) -> None:
        """Run `work` after everything submitted before."""

    def record(self, event: E) -> None:
        """Let `event` be reached once everything submitted before has run."""

    def wait(self, event: E) -> None:
        """Let nothing submitted later run before `event` is reached."""

    def stamp(self, tape: Tape, cell: int) -> Stamp:
        """Work that notes the time at which this stream gets to it in `cell` of `tape`."""

    def synchronize(self, timeout: float) -> None:
        """Block the host until everything submitted so far has run; raise the stream's error."""


class HostEvent:
    """An event of a host stream: a lock that is held while the point is not reached.

    Where an event has one waiter, `take` waits and arms it again at once, so that a program that runs
    many times need not reset its events.
    """

    __slots__ = ("_lock", "error", "name", "taker", "waiter")

    def __init__(self, name: str = "event") -> None:
        self.name = name
        self.error: BaseException | None = None
        self.waiter = _Wait(self)
        self.taker = _Take(self)
        self._lock = threading.Lock()

    def reset(self) -> None:
        """Forget the last record; called where the next one is submitted."""
        self.error = None
        self._lock.acquire(blocking=False)

    def settle(self, error: BaseException | None = None) -> None:
        """Mark the point as reached; `error` is what made its stream fail before it."""
        self.error = error
        if self._lock.locked():
            self._lock.release()

    def query(self) -> bool:
        """Whether the point was reached, without waiting."""
        return not self._lock.locked()

    def take(self, timeout: float = -1) -> None:
        """Block the host as `synchronize` does, for ever without a timeout, and arm the event again."""
        # What has been reached already, as it mostly has, needs no clock: half the time of a wait.
        if not (self._lock.acquire(blocking=False) or self._lock.acquire(timeout=timeout)):
            raise self._late(timeout)
        if self.error is not None:
            raise self.error

    def settle_noted(self, line: Line) -> None:
        """As `settle` without an error, with a stamp before it."""
        line.append(line.clock())
        self.error = None
        if self._lock.locked():
            self._lock.release()

    def take_noted(self, timeout: float, line: Line) -> None:
        """As `take`, and notes the wait as `Line` says.

        Most waits find their point reached and take no time: then one look at the clock, after that was seen,
        serves for both ends.
        """
        reached = self._lock.acquire(False)  # by position: keywords take longer
        now = line.clock()
        if reached and self.error is None:
            line.append(now)
            return
        line.append(-now)
        if not (reached or self._lock.acquire(timeout=timeout)):
            raise self._late(timeout)
        if self.error is not None:
            raise self.error
        line.append(line.clock())

    def synchronize(self, timeout: float) -> None:
        """Block the host; raises as every event does."""
        if self._lock.locked():
            if not self._lock.acquire(timeout=timeout):
                raise self._late(timeout)
            self._lock.release()
        if self.error is not None:
            raise self.error

    def _late(self, timeout: float) -> TransferError:
        return TransferError(
            f"{self.name} was not reached within {timeout:g} s; a peer may have died or run "
            "another forward. See the logs of the other ranks of this group."
        )


class _Wait:
    """A queue item that makes a stream wait for an event; one per event, so that none is allocated."""

    __slots__ = ("event",)

    def __init__(self, event: HostEvent) -> None:
        self.event = event


class _Take(_Wait):
    """As `_Wait`, by the event's only waiter and for as long as it takes: the host has yet to get there."""

    __slots__ = ()


Item = Work | HostEvent | _Wait
"""What a worker runs, records or waits for."""


class HostStream:
    """The calling thread as a stream: the compute stream of an engine that computes on the CPU.

    Work runs at once and a wait blocks the caller for at most `timeout` seconds.
    """

    error = None

    def __init__(self, name: str, *, timeout: float) -> None:
        self.name = name
        self._timeout = timeout

    def event(self, name: str) -> HostEvent:
        """A new event."""
        return HostEvent(name)

    def launch(self, work: Work) -> None:
        """Run `work` now."""
        work()

    def record(self, event: HostEvent) -> None:
        """Reach `event` now: everything before it has run already."""
        event.reset()
        event.settle(None)

    def wait(self, event: HostEvent) -> None:
        """Block until `event` is reached; raises as the event does."""
        event.synchronize(self._timeout)

    def stamp(self, tape: Tape, cell: int) -> Stamp:
        """Notes the host's clock."""
        return tape.line_stamp(self.name, cell)

    def synchronize(self, timeout: float) -> None:
        """Nothing is ever outstanding."""


class CpuStream:
    """A FIFO worker thread. A wait inside the stream gives up after `timeout` seconds.

    As a wait blocks the worker, a whole program can be handed over at once by `hold`, before the events
    that it waits for are recorded.
    """

    def __init__(self, name: str, *, timeout: float) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._timeout = timeout
        self._queue: SimpleQueue[Item | tuple[Item, ...] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kvpp-{name}", daemon=True)
        self._thread.start()

    def event(self, name: str) -> HostEvent:
        """A new event."""
        return HostEvent(name)

    def launch(self, work: Work) -> None:
        """Run `work` on the worker after everything submitted before."""
        self._queue.put(work)

    def record(self, event: HostEvent) -> None:
        """Let `event` be reached once everything submitted before has run."""
        event.reset()
        self._queue.put(event)

    def wait(self, event: HostEvent) -> None:
        """Let nothing submitted later run before `event` is reached."""
        self._queue.put(event.waiter)

    def hold(self, items: tuple[Item, ...]) -> None:
        """Run `items` in order, after everything submitted before: one hand-over for all of them.

        Waits among them that are an event's `taker` have no timeout. The caller arms all events before.
        """
        self._queue.put(items)

    def stamp(self, tape: Tape, cell: int) -> Stamp:
        """Notes the host's clock, when the worker gets to it."""
        return tape.line_stamp(self.name, cell)

    def synchronize(self, timeout: float) -> None:
        """Block until the worker is idle. Raises its error, or TransferError after `timeout` s."""
        event = self.event(f"the end of stream {self.name!r}")
        self.record(event)
        event.synchronize(timeout)

    def close(self) -> None:
        """End the worker once it has run what was submitted; a worker that hangs is left behind."""
        self._queue.put(None)
        self._thread.join(self._timeout)

    def _run(self) -> None:
        while (items := self._queue.get()) is not None:
            for item in items if isinstance(items, tuple) else (items,):
                self._do(item)
        if self.error is None:  # whoever submits something later can see that it will not run
            self.error = TransferError(f"The stream {self.name!r} was closed.")

    def _do(self, item: Item) -> None:
        if isinstance(item, HostEvent):
            item.settle(self.error)
        elif self.error is None:
            try:
                if isinstance(item, _Take):
                    item.event.take()
                elif isinstance(item, _Wait):
                    item.event.synchronize(self._timeout)
                else:
                    item()
            except BaseException as error:  # whatever it was, the waiting thread must see it
                self.error = error

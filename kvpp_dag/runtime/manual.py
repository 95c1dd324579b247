"""A stream that runs one step at a time, when told to: for tests of order and for teaching."""

from collections import deque

from kvpp_dag.errors import TransferError
from kvpp_dag.runtime.streams import HostEvent, Work, _Wait
from kvpp_dag.runtime.tape import Stamp, Tape


class ManualStream:
    """Holds what is submitted until `step` is called; never blocks and starts no thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._items: deque[Work | HostEvent | _Wait] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def event(self, name: str) -> HostEvent:
        """A new event."""
        return HostEvent(name)

    def launch(self, work: Work) -> None:
        """Queue `work`."""
        self._items.append(work)

    def record(self, event: HostEvent) -> None:
        """Queue the record of `event`."""
        event.reset()
        self._items.append(event)

    def wait(self, event: HostEvent) -> None:
        """Queue a wait for `event`."""
        self._items.append(event.waiter)

    def stamp(self, tape: Tape, cell: int) -> Stamp:
        """Notes the tape's clock, when it is stepped over."""
        return tape.line_stamp(self.name, cell)

    def step(self) -> bool:
        """Run the next item; False if there is none or it waits for an event not reached yet."""
        if not self._items:
            return False
        item = self._items[0]
        if isinstance(item, _Wait):
            if not item.event.query():
                return False
            self.error = self.error or item.event.error
        elif isinstance(item, HostEvent):
            item.settle(self.error)
        elif self.error is None:
            try:
                item()
            except Exception as error:
                self.error = error
        self._items.popleft()
        return True

    def synchronize(self, timeout: float) -> None:
        """Run everything that can run. Raises TransferError if something still waits."""
        while self.step():
            pass
        if self.error is not None:
            raise self.error
        if self._items:
            raise TransferError(
                f"Stream {self.name!r} holds {len(self._items)} items that wait for an event; step "
                "the stream that records it."
            )

"""The callback protocol through which `trace` watches the runtime.

Times are nanoseconds of `time.perf_counter_ns`, which on Linux is one monotonic clock for all
processes of a host. Callbacks may come from a stream's own thread; they must be quick and not raise.
"""

from typing import Protocol

from kvpp_dag.graph import Graph


class Observer(Protocol):
    """What happens to a forward, in five callbacks."""

    def forward_began(self, number: int, graph: Graph, now: int) -> None:
        """Forward `number` (counted from 1) of this rank began."""

    def node_submitted(self, node: str, now: int) -> None:
        """The host handed a transfer to its stream."""

    def node_ran(self, node: str, start: int, end: int) -> None:
        """A node ran from `start` to `end`; for an event both are the time it was recorded."""

    def stream_waited(self, event: str, start: int, end: int) -> None:
        """The compute stream stood waiting for `event`: this is exposed time."""

    def forward_ended(self, now: int, error: BaseException | None) -> None:
        """The forward ended, or was aborted because of `error`."""

"""Record what the runtime reports: one `ForwardRecord` per forward, the last ones kept."""

from collections import deque
from dataclasses import dataclass, field

from kvpp_dag.graph import Graph


@dataclass(frozen=True, kw_only=True)
class Span:
    """`node` from `start` to `end`, in nanoseconds of the host's monotonic clock."""

    node: str
    start: int
    end: int


@dataclass(kw_only=True)
class ForwardRecord:
    """One forward of one rank: when nodes were submitted, when they ran, and what was waited for."""

    number: int
    graph: Graph
    began: int
    ended: int = 0
    error: str | None = None
    submitted: dict[str, int] = field(default_factory=dict)
    ran: list[Span] = field(default_factory=list)
    waited: list[Span] = field(default_factory=list)


class Recorder:
    """An observer that keeps the last `keep` forwards, oldest first, in `forwards`."""

    def __init__(self, *, keep: int = 64) -> None:
        self.forwards: deque[ForwardRecord] = deque(maxlen=keep)

    def forward_began(self, number: int, graph: Graph, now: int) -> None:
        """See `kvpp_dag.runtime.Observer`, as for the other callbacks."""
        self.forwards.append(ForwardRecord(number=number, graph=graph, began=now))

    def node_submitted(self, node: str, now: int) -> None:
        """The host handed a transfer to its stream."""
        self.forwards[-1].submitted[node] = now

    def node_ran(self, node: str, start: int, end: int) -> None:
        """A node ran."""
        self.forwards[-1].ran.append(Span(node=node, start=start, end=end))

    def stream_waited(self, event: str, start: int, end: int) -> None:
        """The compute stream stood waiting."""
        self.forwards[-1].waited.append(Span(node=event, start=start, end=end))

    def forward_ended(self, now: int, error: BaseException | None) -> None:
        """The forward ended or was aborted."""
        record = self.forwards[-1]
        record.ended = now
        record.error = None if error is None else f"{type(error).__name__}: {error}"

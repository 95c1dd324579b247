"""What was recorded: forwards of one rank, and the recording that a rank leaves behind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvpp_dag.graph import Graph
from kvpp_dag.plan import StagePlan


class Span(NamedTuple):
    """From `start` to `end`, in nanoseconds of the recording's clock."""

    start: int
    end: int

    @property
    def duration(self) -> int:
        """Nanoseconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class ForwardRecord:
    """One forward of one rank, in nanoseconds of the recording's clock.

    `submitted[b]`: the host handed broadcast `b` to its stream. `spans[n]`: node `n` ran; an event has
    start = end, the time at which it was reached. On an accelerator `began` is when the device got to the
    forward, which the host may have submitted earlier. `waits[c]`: the compute stream stood waiting for
    completion event `c`, which is exposed time. A forward that failed lacks what never ran, and one that
    is still in flight has `ended` 0. `needed_blocks` is how many blocks the batch's history uses, where
    the engine said so; `sent_blocks` is how many of each bundle were sent, None if that is not known. The bytes of
    the graph's broadcasts are those that were sent. `missing` is how many times the device did not tell, because
    it had failed or had not got there: what began or ended at one of them is left out.
    """

    number: int
    graph: Graph
    began: int
    ended: int
    error: str | None
    needed_blocks: int | None
    sent_blocks: int | None = None
    submitted: Mapping[str, int]
    spans: Mapping[str, Span]
    waits: Mapping[str, Span]
    missing: int = 0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The last forwards of one rank, oldest first, and the plan they ran under.

    `clock` names the clock: times of two recordings can be compared only if it is the same, such as that of
    one host. `plan` is None for graphs that were not built from one; then layers have no names.
    """

    rank: int
    ranks: int
    stage: int
    clock: str
    num_blocks: int
    plan: StagePlan | None
    forwards: tuple[ForwardRecord, ...]

    def layer_name(self, ordinal: int) -> str:
        """The engine's name of target layer `ordinal`, or `layer_<ordinal>` without a plan."""
        if self.plan is None or ordinal >= len(self.plan.bundles):
            return f"layer_{ordinal}"
        return self.plan.bundles[ordinal].layer

"""Recordings of forwards that never ran, made by playing the rules of a forward with given durations.

The simulation knows nothing of the analysis: it steps through the hooks as an engine would. A broadcast begins
on a rank when it was handed over there, woke up and the one before it has ended; it ends on every rank
`transfer` after the last rank has begun it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st

from kvpp_dag.graph import Policy, build_forward
from kvpp_dag.trace import ForwardRecord, Recording, Span
from tests.builders import stage

NUM_BLOCKS = 4


@dataclass(kw_only=True)
class Timeline:
    """Durations by layer, with exceptions by layer or by (rank, layer), in nanoseconds.

    `idle` is host time before a hook of a layer that belongs to no node. `wake` is how long the transfer stream
    sleeps on after a broadcast could begin, `resume` how long compute does after a transfer has ended. Ranks
    begin at `begins`; with `agree` the first transfer starts when the last one has begun.
    """

    layers: int = 8
    ranks: int = 2
    depth: int = 1
    policy: Policy = Policy.ON_ACQUIRE
    prologue: int = 3
    attend: int = 2
    compute: int = 6
    transfer: int = 5
    transfers: Mapping[int, int] = field(default_factory=dict)
    attends: Mapping[tuple[int, int], int] = field(default_factory=dict)
    computes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    idle: Mapping[tuple[int, int], int] = field(default_factory=dict)
    wake: Mapping[tuple[int, int], int] = field(default_factory=dict)
    resume: Mapping[tuple[int, int], int] = field(default_factory=dict)
    begins: Mapping[int, int] = field(default_factory=dict)
    agree: bool = True
    began: int = 1000

    def recordings(self, *, number: int = 1, needed_blocks: int | None = None) -> list[Recording]:
        """One forward of every rank."""
        ranks = [_Rank(self, rank) for rank in range(self.ranks)]
        on_release = self.policy is Policy.ON_RELEASE
        for layer in range(min(self.depth + on_release, self.layers)):
            self._send(ranks, layer)
        for rank in ranks:
            rank.run("prologue", self.prologue)
        for layer in range(self.layers):
            for rank in ranks:
                rank.now += self.idle.get((rank.rank, layer), 0)
            if not on_release:
                self._send(ranks, layer + self.depth)
            for rank in ranks:
                rank.wait(layer)
                rank.run(f"attend[{layer}]", self.attends.get((rank.rank, layer), self.attend))
            if on_release:
                self._send(ranks, layer + self.depth + 1)
            for rank in ranks:
                rank.run(f"compute[{layer}]", self.computes.get((rank.rank, layer), self.compute))
        return [rank.recording(number, needed_blocks) for rank in ranks]

    def _send(self, ranks: list["_Rank"], layer: int) -> None:
        """All ranks hand over the broadcast of `layer` at their own times."""
        if layer >= self.layers:
            return
        last_begin = max(rank.began for rank in ranks)
        for rank in ranks:
            rank.spans[f"ready[{layer}]"] = Span(rank.now, rank.now)
            rank.submitted[f"broadcast[{layer}]"] = rank.now
        starts = []
        for rank in ranks:
            start = max(rank.now, rank.link) + self.wake.get((rank.rank, layer), 0)
            starts.append(max(start, last_begin) if self.agree and layer == 0 else start)
        end = max(starts) + self.transfers.get(layer, self.transfer)
        for rank, start in zip(ranks, starts, strict=True):
            rank.spans[f"broadcast[{layer}]"] = Span(start, end)
            rank.spans[f"completion[{layer}]"] = Span(end, end)
            rank.link = end


class _Rank:
    def __init__(self, timeline: Timeline, rank: int) -> None:
        self.timeline = timeline
        self.rank = rank
        self.began = timeline.began + timeline.begins.get(rank, 0)
        self.now = self.began
        self.link = self.began
        self.spans: dict[str, Span] = {}
        self.waits: dict[str, Span] = {}
        self.submitted: dict[str, int] = {}

    def run(self, node: str, duration: int) -> None:
        self.spans[node] = Span(self.now, self.now + duration)
        self.now += duration

    def wait(self, layer: int) -> None:
        arrived = self.now
        ended = self.spans[f"broadcast[{layer}]"].end
        self.now = max(arrived, ended) + self.timeline.resume.get((self.rank, layer), 0)
        self.waits[f"completion[{layer}]"] = Span(arrived, self.now)

    def recording(self, number: int, needed_blocks: int | None) -> Recording:
        t = self.timeline
        plan = stage(t.layers, t.ranks, t.depth)
        graph = build_forward(plan, rank=self.rank, num_blocks=NUM_BLOCKS, history=True, policy=t.policy)
        record = ForwardRecord(
            number=number,
            graph=graph,
            began=self.began,
            ended=self.now,
            error=None,
            needed_blocks=needed_blocks,
            submitted=self.submitted,
            spans=self.spans,
            waits=self.waits,
        )
        return Recording(
            rank=self.rank,
            ranks=t.ranks,
            stage=0,
            clock="a host",
            num_blocks=NUM_BLOCKS,
            plan=plan,
            forwards=(record,),
        )


@st.composite
def timelines(draw, *, quiet: bool = False) -> Timeline:
    """Any timeline; a `quiet` one has no delays and ranks that are alike."""
    layers, ranks = draw(st.integers(1, 8)), draw(st.integers(2, 3))
    durations = st.integers(0, 40)
    every = st.integers(0, layers - 1)
    delays = (
        st.just({}) if quiet else st.dictionaries(st.tuples(st.integers(0, ranks - 1), every), durations)
    )
    return Timeline(
        layers=layers,
        ranks=ranks,
        depth=draw(st.integers(1, 3)),
        policy=draw(st.sampled_from(Policy)),
        prologue=draw(durations),
        attend=draw(durations),
        compute=draw(durations),
        transfer=draw(durations),
        transfers=draw(st.dictionaries(every, durations)),
        attends=draw(delays),
        computes=draw(delays),
        idle=draw(delays),
        wake=draw(delays),
        resume=draw(delays),
        begins={} if quiet else draw(st.dictionaries(st.integers(0, ranks - 1), durations)),
        agree=draw(st.booleans()),
    )

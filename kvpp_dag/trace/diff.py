"""What differs between two recordings: settings, structure, and how far layers moved.

Forwards are compared by kind, with and without history. A figure of a kind is its median over the forwards
that ended without an error; times are nanoseconds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvpp_dag.graph import Graph
from kvpp_dag.graph.diff import Change, GraphDiff, changes_of, diff_graphs
from kvpp_dag.trace.records import ForwardRecord, Recording
from kvpp_dag.trace.transfers import transfer_nodes

SETTINGS = ("rank", "ranks", "stage", "num_blocks")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A median of both recordings; None where there is nothing to measure."""

    a: int | None
    b: int | None

    @property
    def by(self) -> int | None:
        """How much more it is in B."""
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def percent(self) -> float | None:
        """`by` in per cent of A; None where A is 0."""
        return None if self.by is None or not self.a else 100 * self.by / self.a


@dataclass(frozen=True, kw_only=True)
class LayerMove:
    """A layer whose figures differ, or the whole forward if `layer` is None.

    `start` is the start of its transfer after the begin of the forward (for the whole forward: its end),
    `transfer` the time of its transfer, `exposed` the time that compute waited for it.
    """

    layer: int | None
    name: str
    start: Figure
    transfer: Figure
    exposed: Figure

    @property
    def moved(self) -> bool:
        """Whether any figure differs."""
        return any(figure.a != figure.b for figure in (self.start, self.transfer, self.exposed))


@dataclass(frozen=True, kw_only=True)
class KindDiff:
    """Forwards of one kind: their most frequent graphs compared, and what moved, the whole forward first."""

    history: bool
    graph: GraphDiff
    moves: tuple[LayerMove, ...]


@dataclass(frozen=True, kw_only=True)
class RecordingDiff:
    """Differences of two recordings, A and B; only kinds of forward that both have are compared further."""

    stage: int
    rank: int
    settings: tuple[Change, ...]
    kinds: tuple[KindDiff, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.settings and all(kind.graph.equal and not kind.moves for kind in self.kinds)


def diff_recordings(a: Recording, b: Recording) -> RecordingDiff:
    """Compare two recordings: of two ranks, two runs, two policies or two depths."""
    kinds = []
    for history in (True, False):
        of_a, of_b = _ended(a, history), _ended(b, history)
        if of_a and of_b:
            graph = diff_graphs(_usual(of_a), _usual(of_b))
            kinds.append(KindDiff(history=history, graph=graph, moves=_moves(a, of_a, of_b)))
    return RecordingDiff(
        stage=a.stage,
        rank=a.rank,
        settings=(*changes_of(a, b, SETTINGS), *_counts(a, b), *_plans(a, b)),
        kinds=tuple(kinds),
    )


def _ended(recording: Recording, history: bool) -> list[ForwardRecord]:
    return [
        record
        for record in recording.forwards
        if record.graph.history == history and record.ended and record.error is None
    ]


def _usual(records: Sequence[ForwardRecord]) -> Graph:
    """The graph that most of the forwards ran."""
    graphs = {id(record.graph): record.graph for record in records}
    number, _ = Counter(id(record.graph) for record in records).most_common(1)[0]
    return graphs[number]


def _counts(a: Recording, b: Recording) -> list[Change]:
    """How many forwards of each kind there are, where that differs."""
    changes = []
    for field, history in (("forwards with history", True), ("forwards without history", False)):
        left, right = len(_ended(a, history)), len(_ended(b, history))
        if left != right:
            changes.append(Change(field=field, a=left, b=right))
    left, right = (sum(r.error is not None for r in recording.forwards) for recording in (a, b))
    return [*changes, *([Change(field="failed forwards", a=left, b=right)] if left != right else [])]


def _plans(a: Recording, b: Recording) -> list[Change]:
    """Where plans differ: depth, owners by layer, and bytes per block of bundles."""
    if a.plan is None or b.plan is None:
        given = ["none" if r.plan is None else "given" for r in (a, b)]
        return [] if given[0] == given[1] else [Change(field="plan", a=given[0], b=given[1])]
    changes = changes_of(a.plan, b.plan, ("ranks", "depth"))
    left, right = len(a.plan.bundles), len(b.plan.bundles)
    if left != right:
        changes.append(Change(field="layers", a=left, b=right))
    for i in range(min(left, right)):
        name = a.layer_name(i)
        pairs: list[tuple[str, str | int, str | int]] = [
            ("name", name, b.layer_name(i)),
            ("owner", a.plan.owners[i], b.plan.owners[i]),
            ("bytes per block", a.plan.bundles[i].bytes_per_block, b.plan.bundles[i].bytes_per_block),
        ]
        changes += [Change(field=f"{f} of layer {i}", a=x, b=y) for f, x, y in pairs if x != y]
    return changes


_Times = tuple[int, int, int]
"""Start of a transfer after the begin, its time, and the time that compute waited for it."""


def _moves(
    recording: Recording, of_a: Sequence[ForwardRecord], of_b: Sequence[ForwardRecord]
) -> tuple[LayerMove, ...]:
    a, b = _medians(of_a), _medians(of_b)
    moves = []
    for layer in sorted({*a, *b}, key=lambda layer: -1 if layer is None else layer):
        figures = zip(a.get(layer) or (None,) * 3, b.get(layer) or (None,) * 3, strict=True)
        start, transfer, exposed = (Figure(a=x, b=y) for x, y in figures)
        name = "whole forward" if layer is None else recording.layer_name(layer)
        moves.append(LayerMove(layer=layer, name=name, start=start, transfer=transfer, exposed=exposed))
    return tuple(move for move in moves if move.moved)


def _medians(records: Sequence[ForwardRecord]) -> dict[int | None, _Times]:
    """The medians of each transferred layer, and under None those of whole forwards."""
    nodes = {id(record.graph): transfer_nodes(record.graph) for record in records}
    found: dict[int | None, list[_Times]] = {}
    for record in records:
        waited: Counter[int | None] = Counter()
        for event, span in record.waits.items():
            waited[record.graph[event].layer] += span.duration
        sent = 0
        for layer, parts in nodes[id(record.graph)].items():
            spans = [record.spans[node.id] for node in parts if node.id in record.spans]
            if spans:
                start = min(span.start for span in spans)
                took = max(span.end for span in spans) - start
                sent += took
                found.setdefault(layer, []).append((start - record.began, took, waited[layer]))
        whole = (record.ended - record.began, sent, waited.total())
        found.setdefault(None, []).append(whole)
    return {layer: _median(times) for layer, times in found.items()}


def _median(times: Sequence[_Times]) -> _Times:
    start, took, waited = (round(median(column)) for column in zip(*times, strict=True))
    return start, took, waited

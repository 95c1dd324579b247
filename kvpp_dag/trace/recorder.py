"""Record what the runtime notes: one `ForwardRecord` per forward, the last ones kept."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvpp_dag.graph import Graph, Kind
from kvpp_dag.graph.nodes import EVENTS
from kvpp_dag.runtime.payload import chunk_range
from kvpp_dag.runtime.tape import MISSING, Mark, Taken, Tape
from kvpp_dag.trace.records import ForwardRecord, Span

KEEP = 64
"""Forwards that a recorder keeps if it is not told otherwise."""


class Recorder:
    """An observer that keeps the last `keep` forwards, and all of those whose number is in `chosen`.

    `clock` gives nanoseconds. While a forward runs nothing is done here; its times are copied when it has
    ended, on an accelerator when the device has passed its end.
    """

    def __init__(
        self,
        *,
        keep: int = KEEP,
        chosen: range = range(0),
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._clock = clock
        self._range = chosen
        self._last: deque[_Entry] = deque(maxlen=keep)
        self._chosen: list[_Entry] = []
        self._on_tape: dict[int, _Entry] = {}
        self._shared: dict[object, Any] = {}

    @property
    def forwards(self) -> tuple[ForwardRecord, ...]:
        """The last forwards, oldest first. Those of a device have to be over: synchronize it before."""
        return tuple(entry.record() for entry in self._last)

    @property
    def chosen(self) -> tuple[ForwardRecord, ...]:
        """The forwards that were chosen by their numbers, as far as they have begun."""
        return tuple(entry.record() for entry in self._chosen)

    def tape(self, graph: Graph) -> Tape:
        """See `kvpp_dag.runtime.Observer`, as for the other callbacks."""
        return Tape(graph, clock=self._clock, shared=self._shared)

    def forward_began(
        self, tape: Tape, number: int, needed_blocks: int | None, sent_blocks: int | None
    ) -> None:
        """Start the record of a forward on a tape whose earlier forward is over."""
        earlier = self._on_tape.get(id(tape))
        if earlier is not None:
            earlier.settle()
        tape.clear()
        entry = _Entry(
            tape=tape,
            number=number,
            began=self._clock(),
            needed_blocks=needed_blocks,
            sent_blocks=sent_blocks,
        )
        self._on_tape[id(tape)] = entry
        self._last.append(entry)
        if number in self._range:
            self._chosen.append(entry)

    def forward_ended(self, tape: Tape, error: BaseException | None) -> None:
        """Complete the record, or leave the rest to when the device is done."""
        entry = self._on_tape[id(tape)]
        entry.ended = self._clock()
        entry.error = None if error is None else f"{type(error).__name__}: {error}"
        if tape.device is None:
            entry.settle()


@dataclass(kw_only=True, eq=False)
class _Entry:
    """A forward whose times are on its tape until they are settled."""

    tape: Tape
    number: int
    began: int
    needed_blocks: int | None
    sent_blocks: int | None
    ended: int = 0
    error: str | None = None
    taken: Taken | None = None

    def settle(self) -> None:
        """Take the times off the tape."""
        if self.taken is None:
            self.taken = self.tape.take()

    def record(self) -> ForwardRecord:
        """What is known so far; a forward of a device has to be over."""
        if self.ended:
            self.settle()
        times = self.tape.resolve(self.tape.peek() if self.taken is None else self.taken)
        graph = _as_sent(self.tape.graph, self.tape.blocks, self.sent_blocks)
        marks: dict[Mark, dict[str, int]] = {mark: {} for mark in Mark}
        open_ended: dict[Mark, set[str]] = {mark: set() for mark in Mark}
        for (mark, node), cell in self.tape.cells.items():
            if times[cell] > 0:
                marks[mark][node] = times[cell]
            elif times[cell] == MISSING and self.ended:
                open_ended[mark].add(node)
        for mark, end in ((Mark.START, Mark.END), (Mark.WAIT_START, Mark.WAIT_END)):
            for node in open_ended[end]:  # it ended, nobody knows when
                marks[mark].pop(node, None)
        until = max(self.ended, *times)
        began = self.began
        if self.tape.device is not None:  # the host began it earlier, and may have ended it before that
            began = min((*marks[Mark.START].values(), *marks[Mark.WAIT_START].values()), default=began)
        ends = {n: at for n, at in marks[Mark.START].items() if graph[n].kind in EVENTS} | marks[
            Mark.END
        ]
        return ForwardRecord(
            number=self.number,
            graph=graph,
            began=began,
            ended=until if self.ended else 0,
            error=self.error,
            needed_blocks=self.needed_blocks,
            sent_blocks=self.sent_blocks,
            submitted=marks[Mark.SUBMITTED],
            spans=_spans(marks[Mark.START], ends, until),
            waits=_spans(marks[Mark.WAIT_START], marks[Mark.WAIT_END], until),
            missing=sum(times[cell] == MISSING for cell in set(self.tape.cells.values()))
            if self.ended
            else 0,
        )


def _as_sent(graph: Graph, blocks: int, sent: int | None) -> Graph:
    """`graph`, whose broadcasts stand for `blocks` blocks each, with the bytes of the `sent` blocks of a forward."""
    layers = Counter(node.layer for node in graph.broadcasts)
    if sent is None or sent == blocks or not layers:
        return graph
    chunk: Counter[int | None] = Counter()
    nodes = []
    for node in graph.nodes:
        if node.kind is Kind.BROADCAST:
            start, stop = chunk_range(sent, layers[node.layer], chunk[node.layer])
            chunk[node.layer] += 1
            carried = node.bytes // blocks * (stop - start) if blocks else 0
            node = replace(node, bytes=carried)  # noqa: PLW2901
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _spans(starts: Mapping[str, int], ends: Mapping[str, int], until: int) -> dict[str, Span]:
    """Spans by node; what has started and not ended, because it failed, lasts until the end."""
    return {node: Span(start, ends.get(node, until)) for node, start in starts.items()}

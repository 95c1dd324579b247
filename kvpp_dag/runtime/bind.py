"""Bind a program to streams, events and transfers: every step becomes one ready-made call.

Binding happens once per kind of forward; running a hook afterwards is a loop over calls that looks
nothing up and allocates nothing. On streams of the host the worker is given its whole part of the forward
at `begin`, and a hook only lets it go on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from kvpp_dag.graph import COMPUTE_STREAM, Graph, Kind, Node, Program, Step, Wait
from kvpp_dag.graph.names import range_name, wait_name
from kvpp_dag.graph.nodes import TRANSFERS
from kvpp_dag.runtime.observer import Observer
from kvpp_dag.runtime.ranges import Range, ranged
from kvpp_dag.runtime.streams import CpuStream, Event, HostStream, Item, Stream
from kvpp_dag.runtime.tape import Mark, Stamp, Tape

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class BoundHook:
    """The calls of one hook; `drain` are those that an abort still has to make."""

    steps: tuple[Call, ...]
    drain: tuple[Call, ...]


@dataclass(frozen=True, kw_only=True)
class BoundProgram:
    """A program ready to run once at a time: `hooks` are begin, acquire(0), release(0), ..., end.

    `rearm` makes the events wait for their next record, where the worker holds the program. `tape` is where
    the times of an observed program are.
    """

    graph: Graph
    hooks: tuple[BoundHook, ...]
    events: tuple[Event, ...]
    rearm: tuple[Call, ...]
    tape: Tape | None


def bind(
    program: Program,
    *,
    streams: Mapping[str, Stream[Any]],
    transfers: Mapping[str, Call],
    observer: Observer | None,
    timeout: float,
    first: tuple[Call, ...] = (),
    profiled: bool = False,
) -> BoundProgram:
    """Bind `program` to its own events, the given streams and the transfers by node id.

    Two forwards in flight need two bindings, since each owns its events. `timeout` (seconds) bounds a wait
    of the host for a transfer, on streams of the host. `first` are calls with which the first hook begins.
    `profiled` puts everything into ranges for a profiler.
    """
    tape = observer.tape(program.graph) if observer is not None else None
    binder = _HeldBinder if _can_hold(program, streams) else _Binder
    bound = binder(streams, transfers, tape, timeout, profiled).bind(program)
    steps = (*first, *bound.hooks[0].steps)
    if profiled:
        steps = (ranged("kvpp.prepare", partial(_run, steps)),)
    begin = replace(bound.hooks[0], steps=steps)
    return replace(bound, hooks=(begin, *bound.hooks[1:]))


def _can_hold(program: Program, streams: Mapping[str, Stream[Any]]) -> bool:
    """Whether the workers can be given all their steps at once: they block, and no event is waited for twice."""
    awaited = [step.event for hook in program.hooks for step in hook if isinstance(step, Wait)]
    return len(set(awaited)) == len(awaited) and all(
        isinstance(stream, HostStream if name == COMPUTE_STREAM else CpuStream)
        for name, stream in streams.items()
    )


class _Binder:
    """Binds to streams that are told of every step in the hook to which it belongs."""

    def __init__(
        self,
        streams: Mapping[str, Stream[Any]],
        transfers: Mapping[str, Call],
        tape: Tape | None,
        timeout: float,
        profiled: bool,
    ) -> None:
        self.streams = streams
        self.compute = streams[COMPUTE_STREAM]
        self.transfers = transfers
        self.tape = tape
        self.timeout = timeout
        self.profiled = profiled
        self.open: Range | None = None  # the range of the compute node before the hook
        self.events: dict[str, Any] = {}
        self.steps: list[Call] = []
        self.drain: list[Call] = []
        # Cells of the compute stream's stamps: one whose stamp is put off until something follows it, so that
        # marks that fall together share it, and the last one of the hook.
        self.noted: int | None = None
        self.latest: int | None = None

    def bind(self, program: Program) -> BoundProgram:
        """The whole program: compute nodes lie between its hooks."""
        nodes = [node.id for node in program.graph.nodes if node.kind is Kind.COMPUTE]
        between = zip((None, *nodes), program.hooks, (*nodes, None), strict=True)
        hooks = tuple(self._hook(before, steps, after) for before, steps, after in between)
        return BoundProgram(
            graph=program.graph,
            hooks=hooks,
            events=tuple(self.events.values()),
            rearm=(),
            tape=self.tape,
        )

    def _hook(self, before: str | None, steps: tuple[Step, ...], after: str | None) -> BoundHook:
        """The hook between the compute nodes `before` and `after`."""
        self.steps, self.drain, self.noted, self.latest = [], [], None, None
        if before is not None:
            self._note(Mark.END, before)
        if self.open is not None:
            self._flush()
            self.steps.append(self.open.stop)
        for step in steps:
            self._step(step)
        self.open = Range(range_name(after)) if self.profiled and after is not None else None
        if self.open is not None:
            self._flush()
            self.steps.append(self.open.start)
        if after is not None and self.tape is not None:
            if self.latest is not None and steps and steps[-1].stream == COMPUTE_STREAM:
                self.tape.alias(Mark.START, after, self.latest)  # the event takes the stream no time
            else:
                self._note(Mark.START, after)
        self._flush()
        return BoundHook(steps=tuple(self.steps), drain=tuple(self.drain))

    def _step(self, step: Step) -> None:
        on_compute = step.stream == COMPUTE_STREAM
        match step:
            case Wait(event=event) if on_compute:
                self._note(Mark.WAIT_START, event)
                self._wait_on_compute(event)
            case Wait():
                self._wait(step)
            case Node() if step.kind in TRANSFERS:
                self._launch(step)
            case Node() if on_compute:
                self._note(Mark.START, step.id)
                self._record_on_compute(step.id)
            case Node():
                self._record(step)

    def _record_on_compute(self, event: str) -> None:
        record = partial(self.compute.record, self._event(event, self.compute))
        self._add(self._marked(range_name(event), record))

    def _wait_on_compute(self, event: str) -> None:
        wait = partial(self.compute.wait, self._event(event, self.compute))
        self._flush()
        self.steps.append(self._marked(wait_name(event), wait))  # not again in an abort
        self._note(Mark.WAIT_END, event)

    def _launch(self, node: Node) -> None:
        stream, work = self.streams[node.stream], self._work(node)
        if self.tape is not None:
            self._add(self.tape.stamp(self.tape.cell(Mark.SUBMITTED, node.id)))
            start, end = self._stamp(node, Mark.START), self._stamp(node, Mark.END)
            work = partial(_run_noted, start, work, end)
        self._add(partial(stream.launch, work))

    def _record(self, node: Node) -> None:
        stream = self.streams[node.stream]
        if self.tape is not None:  # noted first: once the event is reached, the host may end the forward
            self._add(partial(stream.launch, self._stamp(node, Mark.START)))
        self._add(partial(stream.record, self._event(node.id, stream)))

    def _wait(self, wait: Wait) -> None:
        stream = self.streams[wait.stream]
        self._add(partial(stream.wait, self._event(wait.event, stream)))

    def _work(self, node: Node) -> Call:
        return self._marked(range_name(node.id), self.transfers[node.id])

    def _marked(self, name: str, call: Call) -> Call:
        """`call`, in a range of that name where a profiler is to see it."""
        return ranged(name, call) if self.profiled else call

    def _stamp(self, node: Node, mark: Mark) -> Stamp:
        """A stamp of the node's own stream."""
        tape = cast("Tape", self.tape)
        return self.streams[node.stream].stamp(tape, tape.cell(mark, node.id))

    def _note(self, mark: Mark, node: str) -> None:
        """Note the compute stream's time, once where several marks fall together."""
        if self.tape is None:
            return
        if self.noted is None:
            self.latest = self.noted = self.tape.cell(mark, node)
        else:
            self.tape.alias(mark, node, self.noted)

    def _flush(self) -> None:
        """Make the stamp that was put off."""
        if self.tape is not None and self.noted is not None:
            self.steps.append(self.compute.stamp(self.tape, self.noted))
        self.noted = None

    def _add(self, call: Call) -> None:
        self._flush()
        self.steps.append(call)
        self.drain.append(call)

    def _event(self, name: str, stream: Stream[Any]) -> Any:
        if name not in self.events:
            self.events[name] = stream.event(name)
        return self.events[name]


class _HeldBinder(_Binder):
    """Binds to workers of the host that are given their whole part of the forward at `begin`.

    What is left to a hook is to settle a ready event and to take a completion event. Whoever takes an event
    arms it for the next forward; `rearm` serves the first one, and the one after an abort.
    """

    def bind(self, program: Program) -> BoundProgram:
        """As for other streams, with a hand-over to each worker in front of the first hook."""
        self.items: dict[str, list[Item]] = {}
        # By stream, the cell of the end of a transfer that nothing has followed.
        self.ends: dict[str, int] = {}
        bound = super().bind(program)
        workers = {name: cast("CpuStream", self.streams[name]) for name in self.items}
        calls = tuple(partial(workers[name].hold, tuple(items)) for name, items in self.items.items())
        begin = replace(bound.hooks[0], steps=(*calls, *bound.hooks[0].steps))
        rearm = tuple(event.reset for event in self.events.values())
        for reset in rearm:
            reset()
        return replace(bound, hooks=(begin, *bound.hooks[1:]), rearm=rearm)

    def _record_on_compute(self, event: str) -> None:
        ready = self._event(event, self.compute)
        settle: Call = ready.settle
        self.drain.append(settle)
        if self.tape is not None and self.noted is not None:
            settle = partial(ready.settle_noted, self.tape.line(self.compute.name, self.noted))
            self.noted = None
        self.steps.append(self._marked(range_name(event), settle))

    def _wait_on_compute(self, event: str) -> None:
        completion = self._event(event, self.compute)
        wait: Call = partial(completion.take, self.timeout)
        if self.tape is not None and self.noted is not None:
            self.latest = self.tape.cell(Mark.WAIT_END, event)
            line = self.tape.line(self.compute.name, (self.noted, self.latest))
            wait = partial(completion.take_noted, self.timeout, line)
            self.noted = None
        self.steps.append(self._marked(wait_name(event), wait))  # not again in an abort

    def _launch(self, node: Node) -> None:
        work = self._work(node)
        if self.tape is None:
            self._hold(node, work)
        else:
            if self.latest is None:
                self._note(Mark.SUBMITTED, node.id)
            else:  # the worker may go on to it once the ready event before it has been settled
                self.tape.alias(Mark.SUBMITTED, node.id, self.latest)
            start = self._stamp(node, Mark.START)
            end_cell = self.tape.cell(Mark.END, node.id)
            end = self.streams[node.stream].stamp(self.tape, end_cell)
            self._hold(node, start, work, end)
            self.ends[node.stream] = end_cell

    def _record(self, node: Node) -> None:
        event = self._event(node.id, self.streams[node.stream])
        if self.tape is not None:
            end = self.ends.get(node.stream)
            if end is None:
                self._hold(node, self._stamp(node, Mark.START))
            else:  # the event is reached when the transfer before it has ended
                self.tape.alias(Mark.START, node.id, end)
        self._hold(node, event)

    def _wait(self, wait: Wait) -> None:
        self._hold(wait, self._event(wait.event, self.streams[wait.stream]).taker)

    def _hold(self, step: Step, *items: Item) -> None:
        self.items.setdefault(step.stream, []).extend(items)
        self.ends.pop(step.stream, None)


def _run(steps: tuple[Call, ...]) -> None:
    for step in steps:
        step()


def _run_noted(start: Stamp, work: Call, end: Stamp) -> None:
    start()
    work()
    end()

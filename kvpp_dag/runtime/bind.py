"""Bind a program to streams, events and transfers: every step becomes one ready-made call.

Binding happens once per kind of forward; running a hook afterwards is a loop over calls that looks
nothing up and allocates nothing.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpp_dag.graph import COMPUTE_STREAM, Graph, Op, Program, Step
from kvpp_dag.runtime.observer import Observer
from kvpp_dag.runtime.streams import Event, Stream

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class BoundHook:
    """The calls of one hook; `drain` are those that an abort still has to make."""

    steps: tuple[Call, ...]
    drain: tuple[Call, ...]


@dataclass(frozen=True, kw_only=True)
class BoundProgram:
    """A program ready to run once at a time: `hooks` are begin, acquire(0), release(0), ..., end.

    `ended` is recorded behind the last hook: until it is reached, no event may be recorded again.
    """

    graph: Graph
    hooks: tuple[BoundHook, ...]
    events: tuple[Event, ...]
    ended: Event


def bind(
    program: Program,
    *,
    streams: Mapping[str, Stream[Any]],
    transfers: Mapping[str, Call],
    observer: Observer | None,
) -> BoundProgram:
    """Bind `program` to its own events, the given streams and the transfers by broadcast id.

    Two forwards in flight need two bindings, since each owns its events.
    """
    binder = _Binder(streams, transfers, observer)
    hooks = [program.begin]
    for acquire, release in zip(program.acquire, program.release, strict=True):
        hooks += [acquire, release]
    hooks.append(program.end)
    bound = tuple(binder.hook(steps) for steps in hooks)
    events = tuple(binder.events.values())
    return BoundProgram(
        graph=program.graph,
        hooks=bound,
        events=events,
        ended=streams[COMPUTE_STREAM].event("the end of an earlier forward"),
    )


class _Binder:
    def __init__(
        self,
        streams: Mapping[str, Stream[Any]],
        transfers: Mapping[str, Call],
        observer: Observer | None,
    ) -> None:
        self.streams = streams
        self.transfers = transfers
        self.observer = observer
        self.events: dict[str, Event] = {}

    def hook(self, steps: tuple[Step, ...]) -> BoundHook:
        calls = [(step, self._step(step)) for step in steps]
        return BoundHook(
            steps=tuple(call for _, bound in calls for call in bound),
            drain=tuple(call for step, bound in calls if not _blocks_host(step) for call in bound),
        )

    def _step(self, step: Step) -> tuple[Call, ...]:
        stream = self.streams[step.stream]
        match step.op:
            case Op.LAUNCH:
                return self._launch(step, stream)
            case Op.RECORD:
                record = partial(stream.record, self._event(step.node, stream))
                if self.observer is None:
                    return (record,)
                # Reported first: once the event is reached, the host may end the forward.
                return (partial(stream.launch, partial(_recorded, self.observer, step.node)), record)
            case Op.WAIT:
                wait = partial(stream.wait, self._event(step.node, stream))
                if self.observer is None or step.stream != COMPUTE_STREAM:
                    return (wait,)
                return (partial(_timed_wait, self.observer, step.node, wait),)

    def _launch(self, step: Step, stream: Stream[Any]) -> tuple[Call, ...]:
        work = self.transfers[step.node]
        if self.observer is None:
            return (partial(stream.launch, work),)
        submitted = partial(_submitted, self.observer, step.node)
        timed = partial(_timed_run, self.observer, step.node, work)
        return (submitted, partial(stream.launch, timed))

    def _event(self, node: str, stream: Stream[Any]) -> Event:
        if node not in self.events:
            self.events[node] = stream.event(node)
        return self.events[node]


def _blocks_host(step: Step) -> bool:
    """Whether a step only holds the compute stream back, which an abort must not do again."""
    return step.op is Op.WAIT and step.stream == COMPUTE_STREAM


def _recorded(observer: Observer, node: str) -> None:
    now = time.perf_counter_ns()
    observer.node_ran(node, now, now)


def _submitted(observer: Observer, node: str) -> None:
    observer.node_submitted(node, time.perf_counter_ns())


def _timed_run(observer: Observer, node: str, work: Call) -> None:
    start = time.perf_counter_ns()
    work()
    observer.node_ran(node, start, time.perf_counter_ns())


def _timed_wait(observer: Observer, node: str, wait: Call) -> None:
    start = time.perf_counter_ns()
    wait()
    observer.stream_waited(node, start, time.perf_counter_ns())

"""Run any graph whose nodes carry callables, asynchronously, on streams.

A node goes through these states:

    pending    an edge from another stream is not satisfied yet
    ready      all edges from other streams are satisfied
    submitted  handed to its stream, behind what the graph lists before it there
    running    its callable runs
    done | failed | cancelled

`ready -> submitted` happens in stream order. A failed node cancels every node that a path leads to from
it; all others still run. A stream that fails or is closed fails the node it would have run next.
Cancelling the task cancels every node that does not run yet. In all these cases `run` returns only when
nothing of the graph is left on any stream. Only a timeout does not wait for nodes that run: they cannot
be killed and stay `running`.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any

from kvpp_dag.errors import (
    ConfigError,
    NodeError,
    NodeTimeoutError,
    RunCancelledError,
    TransferError,
    UnsoundGraphError,
)
from kvpp_dag.graph import Graph, Node, verify_alone
from kvpp_dag.graph.nodes import EVENTS
from kvpp_dag.graph.order import Cycle, order_of
from kvpp_dag.runtime.accelerator import AcceleratorStream, CurrentStream
from kvpp_dag.runtime.observer import Observer, Watch
from kvpp_dag.runtime.streams import Stream
from kvpp_dag.runtime.tape import Mark, Tape

Kernel = Callable[[], object]

LOOK_AFTER = 0.1
"""Seconds between two looks at whether the streams of a run are still alive."""


class State(StrEnum):
    """Where a node stands; see the module's docstring."""

    PENDING = "pending"
    READY = "ready"
    SUBMITTED = "submitted"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_FINAL = (State.DONE, State.FAILED, State.CANCELLED)


class Executor:
    """Runs graphs on the given streams, by name.

    The streams must run work on threads of their own (`CpuStream`): one that runs it on the caller's
    thread would block the event loop.
    """

    def __init__(self, streams: Mapping[str, Stream[Any]], *, observer: Observer | None = None) -> None:
        self._streams = streams
        self._observer = observer
        self._watch = None if observer is None else Watch(observer)
        self._runs = 0

    async def run(
        self, graph: Graph, kernels: Mapping[str, Kernel], *, timeout: float | None = None
    ) -> dict[str, State]:
        """Run `graph` once, within `timeout` seconds if given, and return the final state of every node.

        `kernels` holds a callable for every compute, broadcast and copy; event nodes have none. Raises
        ConfigError for a missing or unknown kernel or stream, TransferError for a stream that has failed
        before, UnsoundGraphError for a graph with a race or a deadlock, NodeError for the first node that
        failed, NodeTimeoutError if not all have ended in time (what runs then is not stopped: it goes on,
        and nothing else of its stream runs until it returns), and RunCancelledError if the task was
        cancelled.
        """
        self._check(graph, kernels)
        findings = verify_alone(graph)
        if findings:
            raise UnsoundGraphError(findings[0].message, findings)
        if self._observer is None or self._watch is None:
            return await self._finish(graph, kernels, timeout)
        tape = self._observer.tape(graph)
        noted = {node.id: _noted(tape, node, kernels.get(node.id)) for node in graph.nodes}
        self._runs += 1
        self._watch.began(tape, self._runs, None, None)
        try:
            states = await self._finish(graph, noted, timeout)
        except BaseException as error:
            self._watch.ended(tape, error)
            raise
        self._watch.ended(tape, None)
        return states

    async def _finish(
        self, graph: Graph, kernels: Mapping[str, Kernel], timeout: float | None
    ) -> dict[str, State]:
        run = _Run(graph, kernels, self._streams)
        await run.finish(timeout)
        return run.states

    def _check(self, graph: Graph, kernels: Mapping[str, Kernel]) -> None:
        needed = {n.id for n in graph.nodes if n.kind not in EVENTS}
        if missing := sorted(needed - kernels.keys()):
            raise ConfigError(
                f"Node {missing[0]!r} has no kernel; every compute, broadcast and copy needs one."
            )
        if unknown := sorted(kernels.keys() - needed):
            raise ConfigError(
                f"The kernel {unknown[0]!r} belongs to no compute, broadcast or copy node."
            )
        for node in graph.nodes:
            if node.stream not in self._streams:
                known = ", ".join(sorted(self._streams)) or "none"
                raise ConfigError(
                    f"Node {node.id!r} runs on stream {node.stream!r}; this executor has: {known}."
                )
            if isinstance(self._streams[node.stream], CurrentStream | AcceleratorStream):
                raise ConfigError(
                    f"Stream {node.stream!r} is an accelerator's, where a kernel that has returned has not "
                    "run yet; the executor needs streams that run work on threads of their own."
                )
            failure = self._streams[node.stream].error
            if failure is not None:  # it would skip the node, and the run would never end
                raise TransferError(
                    f"The stream {node.stream!r} has failed before and runs nothing any more: {failure}"
                ) from failure


def _noted(tape: Tape, node: Node, kernel: Kernel | None) -> Kernel:
    """`kernel`, which leaves the times at which it starts and ends on `tape`; an event is reached at once."""
    start = tape.stamp(tape.cell(Mark.START, node.id))
    if kernel is None:
        return start
    end, work = tape.stamp(tape.cell(Mark.END, node.id)), kernel

    def run() -> None:
        start()
        work()
        end()

    return run


class _Run:
    """One run of one graph. Everything but `_execute` happens on the event loop's thread."""

    def __init__(
        self, graph: Graph, kernels: Mapping[str, Kernel], streams: Mapping[str, Stream[Any]]
    ) -> None:
        order = order_of((graph,))
        if isinstance(order, Cycle):
            raise UnsoundGraphError("The graph has a cycle.")
        self.states = {node.id: State.PENDING for node in graph.nodes}
        self._ancestors = {n.id: a for n, a in zip(graph.nodes, order.ancestors, strict=True)}
        self._position = graph.position
        self._kernels = kernels
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._finished = self._loop.create_future()
        self._lock = threading.Lock()
        self._failed = 0  # bit set of failed nodes, written by stream threads before they move on
        self._errors: dict[str, BaseException] = {}
        self._stopped = False  # nothing more may start
        self._abandoned = False  # nobody waits any more for what runs
        self._nodes: dict[str, list[Node]] = {}
        self._missing: dict[str, int] = {}
        self._followers: dict[str, list[Node]] = {node.id: [] for node in graph.nodes}
        self._left = len(graph.nodes)
        for node in graph.nodes:
            self._nodes.setdefault(node.stream, []).append(node)
            foreign = [name for name in node.after if graph[name].stream != node.stream]
            self._missing[node.id] = len(foreign)
            for name in foreign:
                self._followers[name].append(node)
        self._queues = {name: deque(nodes) for name, nodes in self._nodes.items()}

    async def finish(self, timeout: float | None) -> None:
        """Run to the end or the timeout; raises as `Executor.run` says."""
        deadline = None if timeout is None else self._loop.time() + timeout
        for queue in self._queues.values():
            for node in queue:
                self._maybe_ready(node)
        for stream in self._queues:
            self._submit(stream)
        if not self._left:
            self._finished.set_result(None)
        cancelled = False
        while not self._finished.done():
            left = LOOK_AFTER if deadline is None else deadline - self._loop.time()
            if left <= 0:
                self._abandon(f"{timeout:g} s")
                break
            try:
                await asyncio.wait((self._finished,), timeout=min(left, LOOK_AFTER))
            except asyncio.CancelledError:
                cancelled = self._stopped = True  # drain before letting the cancellation through
            self._look_after_streams()
        first = next(iter(self._errors.items()), None)
        if cancelled:
            raise RunCancelledError(self.states) from (first and first[1])
        if first is not None:
            raise self._failure(*first)

    def _failure(self, failed: str, error: BaseException) -> BaseException:
        """What `run` raises for the first node that failed."""
        if isinstance(error, NodeTimeoutError):
            return error
        more = f" ({len(self._errors) - 1} more nodes failed)" if len(self._errors) > 1 else ""
        message = f"Node {failed} failed: {type(error).__name__}: {error}{more}."
        failure = NodeError(message, failed, self.states)
        failure.__cause__ = error
        return failure

    def _maybe_ready(self, node: Node) -> None:
        if not self._missing[node.id] and self.states[node.id] is State.PENDING:
            self.states[node.id] = State.READY

    def _submit(self, stream: str) -> None:
        """Hand over the nodes at the head of a stream's queue that have become ready."""
        queue = self._queues[stream]
        while queue and self.states[queue[0].id] is State.READY:
            node = queue.popleft()
            self.states[node.id] = State.SUBMITTED
            self._streams[stream].launch(partial(self._execute, node))

    def _execute(self, node: Node) -> None:
        """Run one node on its stream's thread and report back."""
        with self._lock:
            cancelled = self._stopped or self._ancestors[node.id] & self._failed
            if not cancelled:
                self.states[node.id] = State.RUNNING
        if cancelled:
            self._report(node, State.CANCELLED)
            return
        kernel = self._kernels.get(node.id)
        try:
            if kernel is not None:
                kernel()
        except BaseException as error:  # reported by run(); the stream's thread must live on
            self._fail(node, error)
            self._report(node, State.FAILED)
        else:
            self._report(node, State.DONE)

    def _fail(self, node: Node, error: BaseException) -> None:
        with self._lock:
            self._failed |= 1 << self._position[node.id]
            if not self._abandoned:
                self._errors[node.id] = error

    def _report(self, node: Node, state: State) -> None:
        with self._lock:
            if not self._abandoned:  # afterwards the event loop may be closed
                self._loop.call_soon_threadsafe(self._settle, node, state)

    def _settle(self, node: Node, state: State) -> None:
        if self._abandoned or self.states[node.id] in _FINAL:
            return
        self.states[node.id] = state
        self._left -= 1
        for follower in self._followers[node.id]:
            self._missing[follower.id] -= 1
            self._maybe_ready(follower)
        for stream in {follower.stream for follower in self._followers[node.id]}:
            self._submit(stream)
        if not self._left and not self._finished.done():
            self._finished.set_result(None)

    def _look_after_streams(self) -> None:
        """Settle what a stream that has failed or was closed will never run, and so never report.

        A stream's worker fails between two nodes, so a node that runs there has its report under way.
        """
        for name in self._queues:
            error = self._streams[name].error
            if error is None:
                continue
            self._queues[name].clear()
            lost = [n for n in self._nodes[name] if self.states[n.id] not in (*_FINAL, State.RUNNING)]
            for node in lost:
                if self._stopped or self._ancestors[node.id] & self._failed:
                    self._settle(node, State.CANCELLED)
                else:
                    reason = TransferError(f"its stream {name!r} runs nothing any more: {error}")
                    reason.__cause__ = error
                    self._fail(node, reason)
                    self._settle(node, State.FAILED)

    def _abandon(self, limit: str) -> None:
        """Stop at the timeout: cancel what does not run, and leave behind what does."""
        with self._lock:
            self._stopped = self._abandoned = True
            running = [name for name, state in self.states.items() if state is State.RUNNING]
            waiting = [name for name, state in self.states.items() if state is State.SUBMITTED]
            for name, state in self.states.items():
                if state not in (*_FINAL, State.RUNNING):
                    self.states[name] = State.CANCELLED
        if running:
            message = (
                f"Node {', '.join(running)} did not return within the {limit} given to the run. A thread "
                "cannot be killed: the node still runs, and its stream runs nothing else until it returns."
            )
        else:
            message = (
                f"Node {waiting[0]} was not reached within the {limit} given to the run: its stream is "
                "busy with something that is not of this graph."
            )
        node = (running or waiting)[0]
        failure = NodeTimeoutError(message, node, self.states)
        failure.__cause__ = next(iter(self._errors.values()), None)
        self._errors = {node: failure}

"""Run any graph whose nodes carry callables, asynchronously, on streams.

A node goes through these states:

    pending    an edge from another stream is not satisfied yet
    ready      all edges from other streams are satisfied
    submitted  handed to its stream, behind what the graph lists before it there
    running    its callable runs
    done | failed | cancelled

`ready -> submitted` happens in stream order. A failed node cancels every node that a path leads to from
it; all others still run. Cancelling the task cancels every node that does not run yet. Either way `run`
returns only when nothing of the graph is left on any stream.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any

from kvpp_dag.errors import ConfigError, NodeError, TransferError, UnsoundGraphError
from kvpp_dag.graph import Graph, Kind, Node, verify_alone
from kvpp_dag.graph.order import Cycle, order_of
from kvpp_dag.runtime.accelerator import AcceleratorStream, CurrentStream
from kvpp_dag.runtime.streams import Stream

Kernel = Callable[[], object]


class State(StrEnum):
    """Where a node stands; see the module's docstring."""

    PENDING = "pending"
    READY = "ready"
    SUBMITTED = "submitted"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Executor:
    """Runs graphs on the given streams, by name.

    The streams must run work on threads of their own (`CpuStream`): one that runs it on the caller's
    thread would block the event loop.
    """

    def __init__(self, streams: Mapping[str, Stream[Any]]) -> None:
        self._streams = streams

    async def run(self, graph: Graph, kernels: Mapping[str, Kernel]) -> dict[str, State]:
        """Run `graph` once and return the final state of every node.

        `kernels` holds a callable for every compute and broadcast node; event nodes have none. Raises
        ConfigError for a missing or unknown kernel or stream, TransferError for a stream that has failed
        before, UnsoundGraphError for a graph with a race or a deadlock, and NodeError for the first node
        that failed.
        """
        self._check(graph, kernels)
        findings = verify_alone(graph)
        if findings:
            raise UnsoundGraphError(findings[0].message, findings)
        run = _Run(graph, kernels, self._streams)
        await run.finish()
        return run.states

    def _check(self, graph: Graph, kernels: Mapping[str, Kernel]) -> None:
        needed = {n.id for n in graph.nodes if n.kind in (Kind.COMPUTE, Kind.BROADCAST)}
        if missing := sorted(needed - kernels.keys()):
            raise ConfigError(
                f"Node {missing[0]!r} has no kernel; every compute and broadcast needs one."
            )
        if unknown := sorted(kernels.keys() - needed):
            raise ConfigError(f"The kernel {unknown[0]!r} belongs to no compute or broadcast node.")
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
        self._stopped = False
        self._queues: dict[str, deque[Node]] = {}
        self._missing: dict[str, int] = {}
        self._followers: dict[str, list[Node]] = {node.id: [] for node in graph.nodes}
        self._left = len(graph.nodes)
        for node in graph.nodes:
            self._queues.setdefault(node.stream, deque()).append(node)
            foreign = [name for name in node.after if graph[name].stream != node.stream]
            self._missing[node.id] = len(foreign)
            for name in foreign:
                self._followers[name].append(node)

    async def finish(self) -> None:
        """Run to the end; raises NodeError for the first failure, and CancelledError if cancelled."""
        for queue in self._queues.values():
            for node in queue:
                self._maybe_ready(node)
        for stream in self._queues:
            self._submit(stream)
        if not self._left:
            self._finished.set_result(None)
        cancelled = False
        while not self._finished.done():
            try:
                await asyncio.shield(self._finished)
            except asyncio.CancelledError:
                cancelled = self._stopped = True  # drain before letting the cancellation through
        if cancelled:
            raise asyncio.CancelledError
        if self._errors:
            failed, error = next(iter(self._errors.items()))
            more = f" ({len(self._errors) - 1} more nodes failed)" if len(self._errors) > 1 else ""
            raise NodeError(
                f"Node {failed} failed: {type(error).__name__}: {error}{more}.", failed, self.states
            ) from error

    def _maybe_ready(self, node: Node) -> None:
        if not self._missing[node.id]:
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
        if self._stopped or self._ancestors[node.id] & self._failed:
            self._report(node, State.CANCELLED)
            return
        self.states[node.id] = State.RUNNING
        kernel = self._kernels.get(node.id)
        try:
            if kernel is not None:
                kernel()
        except BaseException as error:  # reported by run(); the stream's thread must live on
            with self._lock:
                self._failed |= 1 << self._position[node.id]
            self._errors[node.id] = error
            self._report(node, State.FAILED)
        else:
            self._report(node, State.DONE)

    def _report(self, node: Node, state: State) -> None:
        self._loop.call_soon_threadsafe(self._settle, node, state)

    def _settle(self, node: Node, state: State) -> None:
        self.states[node.id] = state
        self._left -= 1
        for follower in self._followers[node.id]:
            self._missing[follower.id] -= 1
            self._maybe_ready(follower)
        for stream in {follower.stream for follower in self._followers[node.id]}:
            self._submit(stream)
        if not self._left and not self._finished.done():
            self._finished.set_result(None)

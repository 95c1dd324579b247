"""What the hooks are timed on: one rank whose transfers move nothing, a thread pool, and a thread that sleeps."""

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from kvpp_dag.graph import Policy, Program
from kvpp_dag.plan import CacheSpec, Component, StagePlan, plan_stage
from kvpp_dag.runtime import Arena, CpuStream, ForwardPass, HostEvent, HostStream, Observer, Payload
from kvpp_dag.runtime.bind import bind
from kvpp_dag.runtime.payload import Ids
from kvpp_dag.runtime.streams import Item, _Wait

NUM_BLOCKS = 1024
"""Blocks of a cache of which only some are sent."""

_DATA = bytes(256 << 10)
_PAUSE = bytes(16 << 10)


def make_plan(layers: int, ranks: int) -> StagePlan:
    """A stage of equal layers of two components."""
    parts = (Component(name="main", bytes_per_block=64), Component(name="indexer", bytes_per_block=8))
    specs = [CacheSpec(layer=f"layers.{i}.attn", index=i, components=parts) for i in range(layers)]
    return plan_stage(specs, ranks=ranks, staging=True)


def compute() -> None:
    """Stands for a layer's compute: a few 100 us without the interpreter lock."""
    hashlib.sha256(_DATA)


def _until(over: Callable[[], bool]) -> None:
    """Let other threads run until a transfer is over, and whoever made it sleeps again."""
    while not over():
        hashlib.sha256(_PAUSE)
    for _ in range(5):
        hashlib.sha256(_PAUSE)


class _Counting:
    """A transport whose broadcasts move nothing and are counted."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.sent = 0

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        return self._send

    def _send(self) -> None:
        self.sent += 1

    def agree(self, token: bytes) -> None:
        """Every rank agrees."""


def nothing() -> None:
    """Moves nothing."""


class DoneAtOnce(CpuStream):
    """A worker that is through with a forward as soon as it has it, so that no hook waits or wakes anybody."""

    def hold(self, items: tuple[Item, ...]) -> None:
        """Reach every event of its own, and arm those that it would wait for."""
        for item in items:
            if isinstance(item, HostEvent):
                item.settle()
            elif isinstance(item, _Wait):
                item.event.reset()


class Rank:
    """One rank of a stage on streams of the host; with `used`, of payload active, which sends those blocks."""

    def __init__(
        self,
        plan: StagePlan,
        *,
        policy: Policy = Policy.ON_RELEASE,
        observer: Observer | None = None,
        used: Ids | None = None,
        worker: type[CpuStream] = CpuStream,
    ) -> None:
        self.layers = len(plan.bundles)
        self.ahead = plan.depth + (policy is Policy.ON_RELEASE)
        self.transport = _Counting(plan.ranks)
        self.used = used
        self.streams: dict[str, Any] = {
            "compute": HostStream("compute", timeout=60.0),
            "transfer": worker("transfer", timeout=60.0),
        }
        if used is not None:
            self.streams["copy"] = worker("copy", timeout=60.0)
        self.forward = ForwardPass(
            arena=Arena(plan, rank=0, num_blocks=1 if used is None else NUM_BLOCKS),
            transport=self.transport,
            **self.streams,
            policy=policy,
            payload=Payload.FULL if used is None else Payload.ACTIVE,
            observer=observer,
        )

    def __enter__(self) -> "Rank":
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.streams.keys() - {"compute"}:
            self.streams[name].close()

    def bind(self, program: Program) -> object:
        """Bind a program of this stage to the streams."""
        calls = {node.id: nothing for node in program.graph.broadcasts}
        return bind(program, streams=self.streams, transfers=calls, observer=None, timeout=60.0)

    def timed(self, compute: Callable[[], object]) -> list[int]:
        """A forward with history: nanoseconds of the two hooks of each layer.

        Every transfer that may have started is over before a hook, and `compute` has run.
        """
        clock, forward = time.perf_counter_ns, self.forward
        forward.begin(history=True)
        taken = []
        for i in range(self.layers):
            self._until_sent(i + self.ahead)
            compute()
            a = clock()
            forward.acquire(i)
            b = clock()
            c = clock()
            forward.release(i)
            taken.append(clock() - c + b - a)
        self._end()
        return taken

    def timed_begin(self, then: Callable[[], object] = nothing) -> int:
        """A forward with history: nanoseconds of `begin`, with the worker asleep; `then` is called after it."""
        started = time.perf_counter_ns()
        self.forward.begin(history=True, used=self.used)
        taken = time.perf_counter_ns() - started
        then()
        for i in range(self.layers):
            self.forward.acquire(i)
            self.forward.release(i)
        self._end()
        return taken

    def timed_begin_awake(self) -> int:
        """As `timed_begin`, with the worker busy, so that nobody has to be woken."""
        gate = threading.Lock()
        gate.acquire()
        entered = threading.Event()
        self.streams["transfer"].launch(entered.set)
        self.streams["transfer"].launch(gate.acquire)
        entered.wait()
        _until(lambda: True)
        return self.timed_begin(then=gate.release)

    def _end(self) -> None:
        self._until_sent(self.layers)
        self.forward.end()
        self.transport.sent = 0

    def _until_sent(self, count: int) -> None:
        _until(lambda: self.transport.sent >= min(count, self.layers))

    def bookkeeping(self) -> int:
        """A forward with history, of a worker that is done at once: nanoseconds of this thread per hook."""
        forward = self.forward
        forward.begin(history=True)
        started = time.thread_time_ns()
        for i in range(self.layers):
            forward.acquire(i)
            forward.release(i)
        taken = time.thread_time_ns() - started
        forward.end()
        return taken // (2 * self.layers)


class Sleeper:
    """A thread that sleeps on a lock until it is released, again and again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.woken = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.lock.acquire()
            self.woken += 1

    def timed_wake(self, compute: Callable[[], object]) -> int:
        """Nanoseconds that it takes to wake it."""
        before = self.woken
        compute()
        started = time.perf_counter_ns()
        self.lock.release()
        taken = time.perf_counter_ns() - started
        _until(lambda: self.woken > before)
        return taken


def timed_pool(layers: int, compute: Callable[[], object]) -> list[int]:
    """As `Rank.timed`, with a future per layer: the hook waits for it and submits the next."""
    clock = time.perf_counter_ns
    taken = []
    with ThreadPoolExecutor(1) as pool:
        future: Future[None] = pool.submit(nothing)
        for i in range(layers):
            _until(future.done)
            compute()
            started = clock()
            future.result()
            if i + 1 < layers:
                future = pool.submit(nothing)
            taken.append(clock() - started)
    return taken

"""What the runtime and trace tests share: small plans, a deterministic engine, and ranks to run it on.

Ranks are threads over a `LocalGroup`, or real processes over gloo or shared memory; all run the same module-level
functions `work(transport, *args)`, of which the larger ones are in `runtime_work`.
"""

import datetime
import hashlib
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from kvpp_dag.graph import Policy
from kvpp_dag.plan import CacheSpec, Component, StagePlan, plan_stage
from kvpp_dag.runtime import (
    Arena,
    CpuStream,
    ForwardPass,
    HostStream,
    LocalGroup,
    Observer,
    ProcessGroupTransport,
    SharedMemoryTransport,
    Transport,
    allocate_zeroed,
    gather_bytes,
)

NUM_BLOCKS = 5
GUARD = 64
SENTINEL = 0xA5
PATIENCE = 60.0
"""Seconds after which a test gives up on a rank that hangs."""


def small_specs(layers: int) -> list[CacheSpec]:
    """Target layers of three different sizes, every other one with an indexer, and one MTP layer."""
    specs = []
    for i in range(layers):
        components = [Component(name="main", bytes_per_block=24 + 8 * (i % 3))]
        if i % 2 == 0:
            components.append(Component(name="indexer", bytes_per_block=8))
        specs.append(CacheSpec(layer=f"layers.{i}.attn", index=i, components=tuple(components)))
    mtp = (Component(name="main", bytes_per_block=40),)
    return [*specs, CacheSpec(layer="mtp.0.attn", index=layers, components=mtp, draft=True)]


def small_plan(layers: int, ranks: int, depth: int = 1) -> StagePlan:
    return plan_stage(small_specs(layers), ranks=ranks, depth=depth)


class GuardedMemory:
    """An allocator whose buffers, filled with a sentinel, have guard bytes on either side.

    The memory is of the kind that `transport` sends from.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self.whole: list[torch.Tensor] = []
        sender = getattr(transport, "inner", transport)
        self._allocate = getattr(sender, "allocate", allocate_zeroed)

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.whole.append(self._allocate(nbytes + 2 * GUARD).fill_(SENTINEL))
        return self.whole[-1][GUARD : GUARD + nbytes]

    def guards_intact(self) -> bool:
        return all(
            bool((tensor[:GUARD] == SENTINEL).all() and (tensor[-GUARD:] == SENTINEL).all())
            for tensor in self.whole
        )


class Counting:
    """A transport that counts the broadcasts which its rank makes."""

    def __init__(self, inner):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.made = 0

    def prepare(self, view, owner):
        send = self.inner.prepare(view, owner)

        def counted():
            self.made += 1
            send()

        return counted

    def agree(self, token):
        self.inner.agree(token)


class Engine:
    """One rank of a deterministic model: every output depends on every cached byte before it.

    `run(token, block)` caches one block per layer; blocks `0..block-1` are the history it reads.
    """

    def __init__(self, arena: Arena, forward: ForwardPass) -> None:
        self.arena = arena
        self.forward = forward

    def run(self, token: int, block: int, *, fail_at: int | None = None) -> str:
        self.forward.begin(history=block > 0)
        x = str(token).encode()
        for bundle in self.forward.plan.bundles:
            layer = bundle.ordinal
            self.forward.acquire(layer)
            if layer == fail_at:
                raise ArithmeticError(f"compute {layer} fell over")
            views = [self.arena.component(layer, c.name) for c in bundle.spec.components]
            history = b"".join(view[:block].numpy().tobytes() for view in views)
            x = hashlib.sha256(x + history).digest()
            for view in views:
                view[block] = repeated(x, view.shape[1])
            self.forward.release(layer)
        self.forward.end()
        return x.hex()

    def owned_bytes(self) -> dict[int, bytes]:
        """The persistent buffers of this rank by ordinal."""
        plan, rank = self.arena.plan, self.arena.rank
        return {b.ordinal: as_bytes(self.arena.cache(b.ordinal)) for b in plan.owned(rank)}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def repeated(content: bytes, length: int) -> torch.Tensor:
    """`length` bytes that repeat `content`."""
    return torch.frombuffer(bytearray((content * length)[:length]), dtype=torch.uint8)


def make_engine(
    plan: StagePlan,
    transport: Transport,
    *,
    memory: Callable[[int], torch.Tensor] | None = None,
    policy: Policy = Policy.ON_ACQUIRE,
    observer: Observer | None = None,
    skip_broadcasts: bool = False,
    timeout: float = 20.0,
) -> Engine:
    arena = Arena(
        plan, rank=transport.rank, num_blocks=NUM_BLOCKS, allocate=memory or GuardedMemory(transport)
    )
    forward = ForwardPass(
        arena=arena,
        transport=transport,
        compute=HostStream("compute", timeout=timeout),
        transfer=CpuStream("transfer", timeout=timeout),
        policy=policy,
        observer=observer,
        timeout=timeout,
        skip_broadcasts=skip_broadcasts,
    )
    return Engine(arena, forward)


def reference(layers: int, blocks: Sequence[int]) -> tuple[list[str], dict[int, bytes]]:
    """Outputs and caches of one rank that holds every layer and transfers nothing."""
    engine = make_engine(small_plan(layers, ranks=1), LocalGroup(1).transport(0))
    outputs = [engine.run(token, block) for token, block in enumerate(blocks)]
    return outputs, engine.owned_bytes()


Work = Callable[..., object]


def run_group(kind: str, size: int, work: Work, *args: object, timeout: float = 10.0) -> list[object]:
    """Run `work(transport, *args)` on every rank; an exception takes the place of a result.

    `kind` is `local` (threads), `gloo` or `shared` (processes). `timeout` bounds every transfer. A process
    that ends without a result gives its exit code as `Died`.
    """
    if kind == "local":
        return run_threads(size, work, *args, timeout=timeout)
    return run_processes(size, work, *args, timeout=timeout, kind=kind)


class Died(Exception):  # noqa: N818
    """A rank's process ended without a result."""


def run_threads(size: int, work: Work, *args: object, timeout: float = 10.0) -> list[object]:
    group = LocalGroup(size, timeout=timeout)
    results: list[object] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(group.transport(rank), *args)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.runtime_work"])


def run_processes(
    size: int, work: Work, *args: object, timeout: float = 10.0, kind: str = "gloo"
) -> list[object]:
    """Processes leave together, when all have reported, so that none breaks another's connections."""
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(size):
            mine, theirs = _SERVER.Pipe()
            process = _SERVER.Process(
                target=_rank_main,
                args=(theirs, rank, size, f"{folder}/store", timeout, kind, work, args),
            )
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        try:
            return [_result(end, p) for end, p in zip(ends, processes, strict=True)]
        finally:
            for end in ends:
                end.close()
            for process in processes:
                process.join(PATIENCE)
                if process.is_alive():
                    process.kill()


def _result(end: Connection, process: multiprocessing.Process) -> object:
    try:
        assert end.poll(PATIENCE), f"process {process.name} hangs"
        return end.recv()
    except EOFError:
        process.join(PATIENCE)
        return Died(process.exitcode)


def _process_transport(kind: str, group: dist.ProcessGroup, size: int, timeout: float) -> Transport:
    if kind == "gloo":
        return ProcessGroupTransport(group, range(size))
    exchange = partial(gather_bytes, group, range(size))
    return SharedMemoryTransport(exchange, rank=dist.get_rank(), ranks=range(size), timeout=timeout)


def _rank_main(
    end: Connection,
    rank: int,
    size: int,
    store: str,
    timeout: float,
    kind: str,
    work: Work,
    args: tuple,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=size)
    group = dist.new_group(list(range(size)), timeout=limit, backend="gloo")
    try:
        result = work(_process_transport(kind, group, size, timeout), *args)
    except Exception as error:
        result = error
    end.send(result)
    end.poll(PATIENCE)  # the parent closes its end when all have reported
    os._exit(0)

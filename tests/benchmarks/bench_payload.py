"""What a forward costs if it sends everything, only the blocks in use, or whichever it takes to be cheaper.

Two processes over gloo run the real `ForwardPass` without any compute; a forward's time is that of the slower rank.
"""

import random
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import torch.distributed as dist

from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM
from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import (
    Arena,
    CpuStream,
    ForwardPass,
    HostStream,
    Payload,
    Transport,
    measure_costs,
)
from kvpp_dag.runtime.payload import Ids
from tests.benchmarks.rows import Bar, Row, make_row, take_turns
from tests.runtime_support import run_processes

BLOCKS, BLOCK_BYTES, LAYERS = 20_000, 18_432, 2
"""Blocks of 16 tokens of an MLA cache in bf16: 369 MB a layer."""

QUICK_BLOCKS = 5_000
SHARES = (0.01, 0.03, 0.1, 0.3, 0.6, 1.0)
QUICK_SHARES = (0.01, 0.1, 0.6, 1.0)
"""Blocks in use over all blocks: K / N."""

TIMEOUT = 120.0
SCATTERED = "scattered"
BAR_SHARE = 0.1
ACTIVE = Bar(limit=0.25, sense="<=")
"""Of full's time, at K / N = `BAR_SHARE`."""

AUTO = Bar(limit=1.1, sense="<=")
"""Of the better one's time, everywhere."""


def rows(quick: bool) -> list[Row]:
    """Active against full, and auto against the better of the two, for every share and both placements."""
    work = partial(
        _rank,
        blocks=QUICK_BLOCKS if quick else BLOCKS,
        shares=QUICK_SHARES if quick else SHARES,
        rounds=7 if quick else 15,
    )
    ranks = run_processes(2, work, timeout=TIMEOUT)
    for result in ranks:
        if isinstance(result, Exception):
            raise result
    first, second = ranks
    found = []
    for (placement, share), seconds in first.items():
        others = second[placement, share]
        slower = {way: list(map(max, seconds[way], others[way])) for way in seconds}
        found += _rows(f"{share:g} of the blocks in use, {placement}", slower, held=share == BAR_SHARE)
    return found


def _rows(name: str, seconds: dict[Payload, list[float]], *, held: bool) -> list[Row]:
    times = {way: [1e3 * one for one in found] for way, found in seconds.items()}
    better = min((Payload.FULL, Payload.ACTIVE), key=lambda way: statistics.median(times[way]))
    against_full = partial(make_row, unit="ms", baselines=times[Payload.FULL])
    return [
        against_full(
            f"{name}: active against full", values=times[Payload.ACTIVE], bar=ACTIVE if held else None
        ),
        make_row(
            f"{name}: auto against the better one ({better})",
            "ms",
            times[Payload.AUTO],
            times[better],
            bar=AUTO,
        ),
    ]


def _rank(
    transport: Transport, *, blocks: int, shares: tuple[float, ...], rounds: int
) -> dict[tuple[str, float], dict[Payload, list[float]]]:
    """Seconds of every payload in every round, by placement and share."""
    specs = [
        CacheSpec(
            layer=f"layers.{i}",
            index=i,
            components=(Component(name="main", bytes_per_block=BLOCK_BYTES),),
        )
        for i in range(LAYERS)
    ]
    plan = plan_stage(specs, ranks=transport.size, staging=True)
    arena = Arena(plan, rank=transport.rank, num_blocks=blocks)
    for layer in range(LAYERS):
        arena.cache(layer).fill_(1)  # so that all of it is in memory
    transfer = CpuStream(TRANSFER_STREAM, timeout=TIMEOUT)
    copy = CpuStream(COPY_STREAM, timeout=TIMEOUT)
    costs = measure_costs(
        arena=arena,
        transport=transport,
        compute=HostStream(COMPUTE_STREAM, timeout=TIMEOUT),
        transfer=transfer,
        copy=copy,
        timeout=TIMEOUT,
    )
    forwards = {
        payload: ForwardPass(
            arena=arena,
            transport=transport,
            compute=HostStream(COMPUTE_STREAM, timeout=TIMEOUT),
            transfer=transfer,
            copy=copy,
            payload=payload,
            costs=costs,
        )
        for payload in Payload
    }
    found = {}
    for placement, choose in PLACEMENTS.items():
        for share in shares:
            if (placement, share) == (SCATTERED, 1.0):
                continue  # the same as contiguous
            used = choose(blocks, round(share * blocks))
            ways = {payload: partial(_forward, forward, used) for payload, forward in forwards.items()}
            found[placement, share] = take_turns(ways, rounds, together=dist.barrier)
    return found


def _forward(forward: ForwardPass, used: Ids) -> None:
    forward.begin(history=True, used=used)
    for layer in range(LAYERS):
        forward.acquire(layer)
        forward.release(layer)
    forward.end()


def _contiguous(blocks: int, used: int) -> Ids:
    """One run in the middle."""
    first = (blocks - used) // 2
    return np.arange(first, first + used)


def _scattered(blocks: int, used: int) -> Ids:
    """Anywhere, equal on every rank."""
    return np.array(sorted(random.Random(0).sample(range(blocks), used)))


PLACEMENTS: dict[str, Callable[[int, int], Ids]] = {
    "contiguous": _contiguous,
    SCATTERED: _scattered,
}

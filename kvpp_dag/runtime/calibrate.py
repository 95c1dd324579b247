"""Measure once, at start, what transfers and copies cost, for the choice of the cheapest way to send."""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch

from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.packing import BlockLists, Packing
from kvpp_dag.runtime.payload import Costs, blocks_in_use
from kvpp_dag.runtime.streams import Stream
from kvpp_dag.runtime.transport import SendsRanges, Transport

SMALL, LARGE = 64, 2 << 20
"""Bytes of a transfer that is all start, and of one that is mostly sending."""

RUNS = 64
"""Ranges of a transfer that is mostly made of them."""

ROUNDS, REPEATS = 3, 2
"""The best of so many rounds counts, each of so many repetitions."""


def measure_costs(
    *,
    arena: Arena,
    transport: Transport,
    compute: Stream[Any],
    transfer: Stream[Any],
    copy: Stream[Any],
    timeout: float,
) -> Costs:
    """What rank 0 has measured, on every rank: over the real transport, and with the copies that pack blocks.

    All ranks of the group call this together, after the arena was made and before the first forward: it uses
    the staging halves, and the first layer's cache, whose content it may change on ranks that do not own
    it. `compute` is the stream on which the arena was made: the others touch it only when what was submitted
    there, its zeroing included, has run. It takes tens of milliseconds, and nothing of it still runs when it
    returns. Raises what a transfer raises, and TransferError after `timeout` seconds.

    Where a staging half is too small for the answer itself, every rank has the default costs, unmeasured:
    so little is sent there that the choice does not matter.
    """
    plan, answer = arena.plan, 8 * len(fields(Costs))
    # Of the plan and the blocks alone, which are equal everywhere: no rank may wait for one that leaves.
    if plan.staging_blocks(arena.num_blocks) * plan.largest_bundle < answer:
        return Costs()
    half = arena.staging(0)
    lists = BlockLists(arena.num_blocks, arena.device)
    _order_behind(compute, transfer, copy)

    def exchange(nbytes: int) -> float:
        """Seconds of a transfer, as half of one there and one back: a sender alone may not see it arrive."""
        owners = (0, transport.size - 1)
        return _seconds(transfer, [transport.prepare(half[:nbytes], o) for o in owners], timeout) / 2

    large = min(LARGE, half.numel())
    start, whole = exchange(min(SMALL, large)), exchange(large)
    run = start
    if isinstance(transport, SendsRanges):
        run = _measure_runs(half, transport, transfer, start, timeout)
    copying = (0.0, 0.0)
    if arena.rank == 0:
        copying = _measure_copies(arena, transport, lists, copy, timeout)
    mine = Costs(
        start=start,
        run=run,
        copy_start=copying[0],
        send=max(whole - start, whole / 2) / large,  # noise must not make it free
        copy=copying[1],
    )
    values = half[:answer].view(torch.float64)
    transfer.launch(partial(values.copy_, torch.tensor(astuple(mine), dtype=torch.float64)))
    transfer.launch(transport.prepare(values, 0))
    transfer.synchronize(timeout)
    names = (field.name for field in fields(Costs))
    return Costs(**dict(zip(names, values.tolist(), strict=True)))


def _order_behind(compute: Stream[Any], *others: Stream[Any]) -> None:
    """Let nothing that the others are given from now on run before what `compute` has been given."""
    made = compute.event("the end of what made the arena")
    compute.record(made)
    for stream in others:
        stream.wait(made)


def _measure_runs(
    half: torch.Tensor, transport: Any, transfer: Stream[Any], start: float, timeout: float
) -> float:
    """Seconds that one more range takes in a transfer; one without takes `start`."""
    ranges = [(place, place + 1) for place in range(0, min(2 * RUNS, half.numel()), 2)]
    sends = [transport.prepare_ranges(half, owner) for owner in (0, transport.size - 1)]
    several = _seconds(transfer, [partial(send, ranges) for send in sends], timeout) / 2
    return max(several - start, several / 2) / (len(ranges) - 1)  # noise must not make it free


def _measure_copies(
    arena: Arena, transport: Transport, lists: BlockLists, copy: Stream[Any], timeout: float
) -> tuple[float, float]:
    """Seconds to start a copy, and per byte, for every other block of the first layer."""
    plan = arena.plan
    pieces = len(plan.bundles[0].spec.components)
    per_block = plan.bundles[0].bytes_per_block
    count = max(1, min(plan.staging_blocks(arena.num_blocks), LARGE // per_block))
    packing = Packing(transport=transport, arena=arena, lists=lists, ordinal=0, chunks=1)

    def seconds(blocks: int) -> float:
        used = blocks_in_use(np.arange(0, 2 * blocks, 2), (), arena.num_blocks)
        copy.launch(partial(lists.take, used, []))
        # The owner packs and the others unpack, so that one of the two does nothing.
        return _seconds(copy, [partial(packing.pack, 0), partial(packing.unpack, 0)], timeout)

    one, many = seconds(1), seconds(count)
    return one / pieces, max(many - one, many / 2) / (count * per_block)


def _seconds(stream: Stream[Any], calls: Sequence[Callable[[], object]], timeout: float) -> float:
    """Seconds that `calls` take on `stream`, one after the other."""
    best = inf
    for _ in range(ROUNDS):
        stream.synchronize(timeout)
        began = time.perf_counter()
        for call in (*calls,) * REPEATS:
            stream.launch(call)
        stream.synchronize(timeout)
        best = min(best, time.perf_counter() - began)
    return best / REPEATS

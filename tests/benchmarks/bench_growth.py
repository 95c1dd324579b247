"""How the host's own cost of a forward grows: with layers, ranks, requests and blocks of cache.

One rank runs the real `ForwardPass` over a transport that is done at once, with bundles of 8 bytes a block, so that
what is left is bookkeeping. The figure is CPU time of the process, all threads together: other load hardly changes it.
All threads share one core. On two, the kernel keeps them together or apart as it sees fit, and waking a thread on
another core takes three times as long: then the figures tell which it chose.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import Arena, CpuStream, ForwardPass, HostStream, Payload
from kvpp_dag.runtime.payload import Ids
from tests.benchmarks.rows import Bar, Row, make_row, rounded, take_turns

BLOCKS_OF_A_REQUEST = 32
"""512 tokens; the blocks of a request lie together, those of two requests do not."""

PAGE = 8
TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank's setting: its plan, its cache and its batch (no requests: whole bundles are sent)."""

    layers: int = 16
    ranks: int = 2
    requests: int = 0
    blocks: int = 256


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Cases that differ in one number, and the largest exponent that is expected of the cost."""

    name: str
    sizes: Sequence[int]
    case: Callable[[int], Case]
    bar: Bar


AXES = (
    Axis(
        name="layers",
        sizes=(8, 16, 32, 64, 128),
        case=lambda size: Case(layers=size),
        bar=Bar(limit=1.1, sense="<=", of="value"),
    ),
    Axis(
        name="ranks",
        sizes=(2, 4, 8, 16, 32),
        case=lambda size: Case(ranks=size, layers=32),
        bar=Bar(limit=0.1, sense="<=", of="value"),
    ),
    Axis(
        name="requests, 32 blocks each",
        sizes=(1, 4, 16, 64, 256),
        case=lambda size: Case(requests=size, blocks=1 << 16),
        bar=Bar(limit=1.0, sense="<=", of="value"),
    ),
    Axis(
        name="blocks of cache, 16 requests",
        sizes=(1 << 13, 1 << 15, 1 << 17, 1 << 19),
        case=lambda size: Case(requests=16, blocks=size),
        bar=Bar(limit=0.1, sense="<=", of="value"),
    ),
)


class InstantTransport:
    """One rank of a group whose broadcasts take no time and move nothing."""

    def __init__(self, size: int) -> None:
        self.rank = 0
        self.size = size

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """Nothing to do."""
        return _nothing

    def agree(self, token: bytes) -> None:
        """There is nobody to disagree."""


def rows(quick: bool) -> list[Row]:
    """For each axis the largest case against the smallest, and the fitted exponent against linear growth."""
    found = []
    with _on_one_core():
        for axis in AXES:
            found += _rows(axis, rounds=5 if quick else 21, forwards=10 if quick else 30)
    return found


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Keep this thread, and those that it starts, on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _rows(axis: Axis, rounds: int, forwards: int) -> list[Row]:
    ways = {str(size): _forwards(axis.case(size), forwards) for size in axis.sizes}
    seconds = take_turns(ways, rounds, clock=time.process_time)
    micros = {size: [1e6 * one / forwards for one in seconds[str(size)]] for size in axis.sizes}
    smallest, largest = axis.sizes[0], axis.sizes[-1]
    exponents = [
        exponent(axis.sizes, [micros[size][number] for size in axis.sizes]) for number in range(rounds)
    ]
    return [
        make_row(
            f"a forward against {axis.name}: {largest} against {smallest}",
            "µs of CPU",
            micros[largest],
            micros[smallest],
        ),
        make_row(
            f"exponent of a forward's cost against {axis.name}",
            "exponent",
            exponents,
            [1.0] * rounds,
            bar=axis.bar,
        ),
    ]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The p of the best fit cost = c * size ** p."""
    slope, _ = np.polyfit(np.log(sizes), np.log(costs), 1)
    return rounded(float(slope))


def _forwards(case: Case, forwards: int) -> Callable[[], None]:
    """As many forwards of one case."""
    specs = [
        CacheSpec(
            layer=f"layers.{i}", index=i, components=(Component(name="main", bytes_per_block=PAGE),)
        )
        for i in range(case.layers)
    ]
    plan = plan_stage(specs, ranks=case.ranks, staging=case.requests > 0)
    forward = ForwardPass(
        arena=Arena(plan, rank=0, num_blocks=case.blocks),
        transport=InstantTransport(case.ranks),
        compute=HostStream(COMPUTE_STREAM, timeout=TIMEOUT),
        transfer=CpuStream(TRANSFER_STREAM, timeout=TIMEOUT),
        copy=CpuStream(COPY_STREAM, timeout=TIMEOUT),
        policy=Policy.ON_RELEASE,
        payload=Payload.ACTIVE if case.requests else Payload.FULL,
    )
    return partial(_run, forward, case.layers, _blocks_in_use(case), forwards)


def _blocks_in_use(case: Case) -> Ids | None:
    """Runs of blocks at equal distances."""
    if not case.requests:
        return None
    starts = np.arange(case.requests) * (case.blocks // case.requests)
    return (starts[:, None] + np.arange(BLOCKS_OF_A_REQUEST)).reshape(-1)


def _run(forward: ForwardPass, layers: int, used: Ids | None, forwards: int) -> None:
    for _ in range(forwards):
        forward.begin(history=True, used=used)
        for layer in range(layers):
            forward.acquire(layer)
            forward.release(layer)
        forward.end()


def _nothing() -> None:
    """A transfer that is done."""

"""Transports between two processes of this host, each against one memcpy of one process in the same run.

    python -m tests.benchmarks.bench_transports [--quick]

Every round does each way once, one after the other, so that what else runs on the machine meets them alike. A
broadcast's time is that of the rank that took longer; a ratio is the median over rounds, with quartiles.
"""

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from kvpp_dag.runtime import (
    ProcessGroupTransport,
    SharedMemoryTransport,
    gather_bytes,
    process_group,
)
from tests.runtime_support import run_processes

MIB = 1 << 20
SIZES = (16, 64, 256)
SHARED, GLOO, GLOO_2, GLOO_4, MEMCPY = (
    "shared memory",
    "gloo",
    "gloo, 2 groups",
    "gloo, 4 groups",
    "memcpy",
)
BAR = 0.7
"""Of one memcpy, for shared memory."""


def rows(quick: bool) -> list[dict[str, Any]]:
    """A row per way and size: GB/s, those of memcpy, their ratio, and the bar if there is one."""
    found = []
    for mib in SIZES:
        rounds = 7 if quick else 21
        durations = _durations(mib * MIB, rounds)
        for way in (SHARED, GLOO, GLOO_2, GLOO_4):
            against = GLOO if way in (GLOO_2, GLOO_4) else MEMCPY
            found.append(_row(way, against, mib, durations))
    return found


def _row(way: str, against: str, mib: int, durations: dict[str, list[float]]) -> dict[str, Any]:
    pairs = zip(durations[against], durations[way], strict=True)
    low, ratio, high = statistics.quantiles([base / taken for base, taken in pairs], n=4)
    bar = BAR if way == SHARED else None
    return {
        "name": f"broadcast of {mib} MiB, {way} against {against}",
        "value": _rate(mib, durations[way]),
        "unit": "GB/s",
        "baseline": _rate(mib, durations[against]),
        "ratio": round(ratio, 3),
        "spread": [round(low, 3), round(high, 3)],
        "bar": None if bar is None else f"ratio >= {bar:g}",
        "holds": None if bar is None else ratio >= bar,
    }


def _rate(mib: int, durations: list[float]) -> float:
    return round(mib * MIB / statistics.median(durations) / 1e9, 2)


def _durations(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per way and round: of memcpy on one rank, of a broadcast on the slower one."""
    ranks = run_processes(2, partial(_measure, nbytes=nbytes, rounds=rounds))
    for result in ranks:
        if isinstance(result, Exception):
            raise result
    first, second = ranks
    return {way: list(map(max, first[way], second[way])) for way in second}


def _measure(transport: ProcessGroupTransport, nbytes: int, rounds: int) -> dict[str, list[float]]:
    process_group.LARGE = 1
    group, ranks = transport.group, transport.ranks
    exchange = partial(gather_bytes, group, ranks)
    shared = SharedMemoryTransport(exchange, rank=transport.rank, ranks=ranks, timeout=60)
    more = [dist.new_group(list(ranks), backend="gloo") for _ in range(3)]
    view = shared.allocate(nbytes).fill_(1)  # both ends, as an arena takes all its memory there
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))

    def memcpy() -> None:
        if shared.rank == 1:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)

    ways: dict[str, Callable[[], None]] = {
        MEMCPY: memcpy,
        SHARED: shared.prepare(view, 0),
        GLOO: transport.prepare(view, 0),
        GLOO_2: ProcessGroupTransport(group, ranks, more_groups=more[:1]).prepare(view, 0),
        GLOO_4: ProcessGroupTransport(group, ranks, more_groups=more).prepare(view, 0),
    }
    durations: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, rounds):  # the first warms up
        for way, run in ways.items():
            shared.agree(way.encode())  # both start together
            started = time.perf_counter()
            run()
            if number >= 0:
                durations[way].append(time.perf_counter() - started)
    shared.agree(b"done")
    return durations


if __name__ == "__main__":
    for row in rows("--quick" in sys.argv):
        print(json.dumps(row))

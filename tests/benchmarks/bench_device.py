"""What a device adds: the self check at start, and the host's cost of a hook that submits to streams of a device.

    python -m tests.benchmarks.bench_device [--quick]

The device is the test device, in processes of its own; a real accelerator's figures are another machine's. The
baseline of the hooks is that of bench_hotpath on the same streams: a thread of a pool waits for the ready event,
submits the transfer and records its completion; the hook takes the future's result, waits for that event and asks for
the next transfer. In both a transfer is one small copy on the device, and is over before the next hook. A third way are
the calls of torch that our hooks make, and nothing else.
"""

import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from kvpp_dag.graph import Policy
from kvpp_dag.runtime import (
    Arena,
    ForwardPass,
    Payload,
    allocate_zeroed,
    check_forwards,
    make_streams,
)
from tests.benchmarks.bench_hotpath import _against, _ratios, _row, percentile
from tests.benchmarks.hook_timing import compute, make_plan
from tests.benchmarks.rows import Row
from tests.device.build import NAME, build_test_device, load_test_device
from tests.device.self_check_process import check_in_process
from tests.device.self_check_ranks import Check
from tests.runtime_support import run_group

SIZES = [(40, 2), (80, 8)]
"""Layers and ranks."""

LAYERS, RANKS = 80, 2
SECOND = 1e9
TIMEOUT = 60.0


def rows(quick: bool) -> list[Row]:
    """The hooks' rows, and those of the self check."""
    cache = Path(tempfile.gettempdir(), "kvpp_device")
    cache.mkdir(exist_ok=True)
    library = str(build_test_device(cache))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        hooks = list(pool.map(partial(hook_rows, library=library, quick=quick), SIZES))
    return [*chain(*hooks), *_self_check_rows(library, rounds=3 if quick else 9)]


def _self_check_rows(library: str, rounds: int) -> list[Row]:
    """Two processes with caches on the test device, and two with caches of the host."""
    on_host = [result for _ in range(rounds) for result in run_group("gloo", RANKS, host_seconds)]
    failed = [result for result in on_host if isinstance(result, Exception)]
    if failed:
        raise failed[0]
    seconds = {"device": device_seconds(library, rounds), "host": on_host}
    return [
        _row(
            f"self check at start, {LAYERS} layers x {RANKS} ranks, payload auto, caches on the {where}",
            [round(SECOND * some) for some in found],
            SECOND,
            "s",
            most=1.0,
        )
        for where, found in seconds.items()
    ]


def device_seconds(library: str, rounds: int) -> list[float]:
    """Seconds of `rounds` self checks on each rank; the first one warms up."""
    checks = {str(number): Check(layers=LAYERS) for number in range(rounds + 1)}
    with tempfile.TemporaryDirectory() as folder:
        work = partial(
            check_in_process, folder=folder, library=library, size=RANKS, checks=checks, figures=True
        )
        with ProcessPoolExecutor(RANKS, mp_context=multiprocessing.get_context("spawn")) as pool:
            ranks = list(pool.map(work, range(RANKS)))
    return [float(said[str(number)]) for said in ranks for number in range(1, rounds + 1)]


def host_seconds(transport: Any) -> float:
    """Seconds of a self check with caches of the host."""
    plan = make_plan(LAYERS, RANKS)
    arena = Arena(plan, rank=transport.rank, num_blocks=64)
    streams = make_streams(torch.device("cpu"), timeout=TIMEOUT)
    forward = ForwardPass(
        arena=arena,
        transport=transport,
        compute=streams.compute,
        transfer=streams.transfer,
        copy=streams.copy,
        payload=Payload.AUTO,
        timeout=TIMEOUT,
    )
    checked = check_forwards(forward, arena=arena, transport=transport, streams=streams, timeout=TIMEOUT)
    return checked.seconds


def hook_rows(size: tuple[int, int], *, library: str, quick: bool) -> list[Row]:
    """Hooks of ours and of a thread pool, in turns, in a process of its own."""
    load_test_device(Path(library))
    torch.set_num_threads(1)
    layers, ranks = size
    forwards = 10 if quick else 40
    found = []
    for policy in Policy:
        ours: list[list[int]] = []
        pooled: list[list[int]] = []
        bare: list[list[int]] = []
        rank = DeviceRank(layers, ranks, policy)
        for number in range(forwards + 1):
            turn = rank.timed(), rank.timed_pool(), rank.timed_calls()
            if number:  # the first warms up
                ours.append(turn[0])
                pooled.append(turn[1])
                bare.append(turn[2])
        size = f"{policy}, p50, {layers} layers x {ranks} ranks"
        for against, theirs, most in (("", pooled, 0.5), (" against their calls of torch", bare, None)):
            found.append(
                _against(
                    f"hooks of one layer on streams of the test device{against}, {size}",
                    percentile(list(chain(*ours)), 50),
                    percentile(list(chain(*theirs)), 50),
                    ratios=_ratios(ours, theirs),
                    most=most,
                )
            )
    return found


class _Copying:
    """A transport whose broadcasts are one small copy on the device."""

    def __init__(self, size: int, copy: Any) -> None:
        self.rank, self.size, self.copy = 0, size, copy

    def prepare(self, view: torch.Tensor, owner: int) -> Any:
        return self.copy

    def agree(self, token: bytes) -> None:
        """Every rank agrees."""


class DeviceRank:
    """One rank on streams of the test device."""

    def __init__(self, layers: int, ranks: int, policy: Policy) -> None:
        device = torch.device(NAME, 0)
        source, target = (torch.zeros(1024, dtype=torch.uint8, device=device) for _ in range(2))
        self.copy = partial(target.copy_, source, non_blocking=True)
        self.layers = layers
        plan = make_plan(layers, ranks)
        streams = make_streams(device, timeout=TIMEOUT)
        self.forward = ForwardPass(
            arena=Arena(plan, rank=0, num_blocks=1, allocate=partial(allocate_zeroed, device=device)),
            transport=_Copying(ranks, self.copy),
            compute=streams.compute,
            transfer=streams.transfer,
            copy=streams.copy,
            control=streams.control,
            policy=policy,
        )
        self.stream = torch.Stream(device=device)
        self.ready, self.done = torch.Event(device), torch.Event(device)

    def timed(self) -> list[int]:
        """A forward with history: nanoseconds of the two hooks of each layer."""
        clock, forward = time.perf_counter_ns, self.forward
        forward.begin(history=True)
        taken = []
        for i in range(self.layers):
            _settle()
            a = clock()
            forward.acquire(i)
            b = clock()
            c = clock()
            forward.release(i)
            taken.append(clock() - c + b - a)
        forward.end()
        return taken

    def timed_pool(self) -> list[int]:
        """The same with a future per layer."""
        clock, taken = time.perf_counter_ns, []
        with ThreadPoolExecutor(1) as pool:
            self.ready.record()
            future: Future[None] = pool.submit(self._transfer)
            for i in range(self.layers):
                while not future.done():
                    compute()
                _settle()
                started = clock()
                future.result()
                self.done.wait()
                if i + 1 < self.layers:
                    self.ready.record()
                    future = pool.submit(self._transfer)
                taken.append(clock() - started)
        return taken

    def timed_calls(self) -> list[int]:
        """The same of what torch is asked for by our hooks alone."""
        clock, taken = time.perf_counter_ns, []
        for _ in range(self.layers):
            _settle()
            started = clock()
            self.done.wait()
            self.ready.record()
            self._transfer()
            taken.append(clock() - started)
        return taken

    def _transfer(self) -> None:
        with self.stream:
            self.ready.wait(self.stream)
            self.copy()
            self.done.record(self.stream)


def _settle() -> None:
    """Some compute, in which the device has finished what was submitted and its threads sleep again."""
    for _ in range(2):
        compute()


if __name__ == "__main__":
    print(json.dumps(rows("--quick" in sys.argv), indent=1))

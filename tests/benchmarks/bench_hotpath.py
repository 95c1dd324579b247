"""What the host does: compiling, verifying and binding a forward once, and its hooks at every layer.

    python -m tests.benchmarks.bench_hotpath [--quick]

What is compared runs in turns, in one process; a value is the median, its spread are the 10th and the 90th
percentile. What runs on one thread and waits for nothing is measured in that thread's time, so that what else runs
on the machine does not count; a hook by the clock, with a transfer that is over before the hook and moves nothing.
The baseline of the hooks is what others do: one future of a thread pool per layer, of which the hook takes the result
and submits the next.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

import numpy as np

from kvpp_dag.graph import Finding, Graph, Policy, build_forward, lower, verify_sequences
from kvpp_dag.graph.verify import collective_order
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import compile_forwards
from kvpp_dag.trace import Recorder
from tests.benchmarks.hook_timing import (
    NUM_BLOCKS,
    DoneAtOnce,
    Rank,
    Sleeper,
    compute,
    make_plan,
    nothing,
    timed_pool,
)
from tests.benchmarks.rows import Bar, Row, rounded

US, MS = 1e3, 1e6
SIZES = [(40, 2), (80, 8), (128, 64)]
"""Layers and ranks."""

SCATTERED = np.arange(0, 2 * 64, 2)
"""Blocks in use, of `NUM_BLOCKS`."""

CHUNKS = (1, 2, 4, 8)


def rows(quick: bool) -> list[Row]:
    """A row per question; `bar` is what is asked for, None where nothing is."""
    found = []
    for layers, ranks in SIZES:
        found += _compile_rows(layers, ranks, rounds=21 if quick else 101)
    for layers, ranks in SIZES:
        found.append(_bookkeeping_row(layers, ranks, forwards=20 if quick else 100))
        found += _hook_rows(layers, ranks, forwards=8 if quick else 40)
        found += _begin_rows(layers, ranks, forwards=50 if quick else 200)
        found.append(_recording_row(layers, ranks, forwards=8 if quick else 40))
    for (layers, ranks), chunks in product(SIZES, ((), CHUNKS)):
        found.append(_verify_row(layers, ranks, chunks, every=max(ranks // 4, 1) if quick else 1))
    return found


def _compile_rows(layers: int, ranks: int, rounds: int) -> Iterator[Row]:
    size = f"{layers} layers x {ranks} ranks"
    plan = make_plan(layers, ranks)
    graph = _full(plan)
    program = lower(graph)
    most = 2.0 if layers == 80 else None
    work: dict[str, Callable[[], object]] = {
        "compile, cold (build and lower)": lambda: lower(_full(plan)),
        "verify, one graph": lambda: verify_sequences([graph]),
        "verify and build without chunks": lambda: compile_forwards(
            plan, 0, NUM_BLOCKS, Policy.ON_RELEASE
        ),
    }
    with Rank(plan) as rank:
        work["bind"] = lambda: rank.bind(program)
        times = _in_turns(work, rounds)
    for name, samples in times.items():
        limit = most if name.startswith("compile") else None
        yield _row(f"{name}, {size}", samples, MS, "ms of one thread", most=limit)


def _hook_rows(layers: int, ranks: int, forwards: int) -> Iterator[Row]:
    """Hooks right after each other, and after some compute, which leaves little of them in the caches.

    Ours and the baseline both wake a thread at every layer; what that takes is a row of its own.
    """
    sleeper = Sleeper()
    plan = make_plan(layers, ranks)
    for before, when in ((nothing, "hot"), (compute, "after compute")):
        ours: dict[Policy, list[list[int]]] = {policy: [] for policy in Policy}
        pooled: list[list[int]] = []
        wakes: list[int] = []
        with Rank(plan, policy=Policy.ON_ACQUIRE) as acquire, Rank(plan) as release:
            for number in range(forwards + 1):
                turn = (acquire.timed(before), release.timed(before), timed_pool(layers, before))
                wakes += [sleeper.timed_wake(before) for _ in range(layers)]
                if number:  # the first warms up
                    ours[Policy.ON_ACQUIRE].append(turn[0])
                    ours[Policy.ON_RELEASE].append(turn[1])
                    pooled.append(turn[2])
        size = f"{when}, {layers} layers x {ranks} ranks"
        base = list(chain(*pooled))
        yield _row(f"waking a thread that sleeps, {size}", wakes, US, "us")
        for policy, percent in product(Policy, (50, 90, 99)):
            yield _against(
                f"hooks of one layer, {policy}, p{percent}, {size}",
                percentile(list(chain(*ours[policy])), percent),
                percentile(base, percent),
                ratios=_ratios(ours[policy], pooled),
                most=0.5 if percent == 50 else None,
            )


def _begin_rows(layers: int, ranks: int, forwards: int) -> Iterator[Row]:
    """`begin` of one forward after the other, against the wake of a thread, of which it makes one; and without it.

    With payload active it looks at the blocks in use as well, and copies them.
    """
    sleeper = Sleeper()
    plan = make_plan(layers, ranks)
    for used, what in ((None, ""), (SCATTERED, f", active, {len(SCATTERED)} blocks")):
        begins, awake, wakes = [], [], []
        with Rank(plan, used=used) as rank:
            for number in range(forwards + 1):
                turn = rank.timed_begin(), rank.timed_begin_awake(), sleeper.timed_wake(nothing)
                if number:
                    begins.append(turn[0])
                    awake.append(turn[1])
                    wakes.append(turn[2])
        size = f"{layers} layers x {ranks} ranks"
        wake = percentile(wakes, 50)
        name = f"begin, cached{what}, against waking a sleeping thread, {size}"
        found = _row(name, begins, US, "us", most=5.0)
        yield found | {
            "baseline": rounded(wake / US),
            "ratio": rounded(percentile(begins, 50) / wake),
        }
        yield _row(f"begin, cached{what}, of a worker that is awake, {size}", awake, US, "us")


def _bookkeeping_row(layers: int, ranks: int, forwards: int) -> Row:
    with Rank(make_plan(layers, ranks), worker=DoneAtOnce) as rank:
        samples = [rank.bookkeeping() for _ in range(forwards + 1)][1:]
    size = f"{layers} layers x {ranks} ranks"
    return _row(f"bookkeeping of one hook, {size}", samples, US, "us of one thread", most=2.0)


def _recording_row(layers: int, ranks: int, forwards: int) -> Row:
    plan = make_plan(layers, ranks)
    off: list[list[int]] = []
    on: list[list[int]] = []
    with Rank(plan) as plain, Rank(plan, observer=Recorder()) as recorded:
        for number in range(forwards + 1):
            pair = (plain.timed(nothing), recorded.timed(nothing))
            if number:
                off.append(pair[0])
                on.append(pair[1])
    return _against(
        f"hooks of one layer, recorded against not, {layers} layers x {ranks} ranks",
        percentile(list(chain(*on)), 50),
        percentile(list(chain(*off)), 50),
        ratios=_ratios(on, off),
        most=1.05 if layers == 80 else None,
    )


def _ratios(ours: list[list[int]], theirs: list[list[int]]) -> list[float]:
    """The ratio of the medians of each turn."""
    return [percentile(a, 50) / percentile(b, 50) for a, b in zip(ours, theirs, strict=True)]


def _verify_row(layers: int, ranks: int, chunks: tuple[int, ...], every: int) -> Row:
    """The proof of every kind of forward on all ranks; in a quick run of some ranks, and multiplied."""
    plan = make_plan(layers, ranks)
    some = range(0, ranks, every)
    started = time.thread_time_ns()
    first: list[Graph] = []
    findings: list[Finding] = []
    for rank in some:  # one after the other, as a rank holds no graph but its own
        graphs = _all_kinds(plan, rank, chunks)
        findings += verify_sequences(graphs)
        if first:
            findings += chain(*map(collective_order, zip(first, graphs, strict=True)))
        else:
            first = graphs
    taken = (time.thread_time_ns() - started) * ranks // len(some)
    if findings:
        raise RuntimeError(f"A compiled forward is unsound: {findings[0].message}")
    what = f"with chunks {', '.join(map(str, chunks))}" if chunks else "without chunks"
    name = f"build and verify all kinds {what} on all ranks, {layers} layers x {ranks} ranks"
    return _row(name, [taken], 1e9, "s of one thread", most=10.0)


def _all_kinds(plan: StagePlan, rank: int, chunks: tuple[int, ...]) -> list[Graph]:
    graphs = [_full(plan, rank=rank, chunks=count) for count in (0, *chunks)]
    return [*graphs, _full(plan, rank=rank, history=False)]


def _row(name: str, samples: list[int], scale: float, unit: str, *, most: float | None = None) -> Row:
    """A row of nanoseconds in units of `scale` ns, whose value may be `most`."""
    found = {
        "name": name,
        "value": rounded(percentile(samples, 50) / scale),
        "unit": unit,
        "baseline": None,
        "ratio": None,
        "spread": [rounded(percentile(samples, p) / scale) for p in (10, 90)],
    }
    return _judged(found, None if most is None else Bar(limit=most, sense="<=", of="value"))


def _against(
    name: str, value: float, baseline: float, *, ratios: list[float], most: float | None = None
) -> Row:
    """A row of nanoseconds whose ratio to a baseline may be `most`; `ratios` are those of the single turns."""
    found = {
        "name": name,
        "value": rounded(value / US),
        "unit": "us",
        "baseline": rounded(baseline / US),
        "ratio": rounded(value / baseline),
        "spread": [rounded(percentile(ratios, p)) for p in (10, 90)],
    }
    return _judged(found, None if most is None else Bar(limit=most, sense="<="))


def _judged(found: Row, bar: Bar | None) -> Row:
    if bar is None:
        return found | {"bar": None, "holds": None}
    return found | {"bar": str(bar), "holds": bar.holds(found)}


def percentile(samples: list[Any], percent: int) -> float:
    """A percentile, of one sample or more."""
    if len(samples) == 1:
        return float(samples[0])
    return float(statistics.quantiles(samples, n=100, method="inclusive")[percent - 1])


def _full(plan: StagePlan, *, rank: int = 0, history: bool = True, chunks: int = 0) -> Graph:
    return build_forward(
        plan,
        rank=rank,
        num_blocks=NUM_BLOCKS,
        history=history,
        policy=Policy.ON_RELEASE,
        chunks=chunks,
    )


def _in_turns(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[int]]:
    """Nanoseconds of this thread that each piece of work took, round by round."""
    times: dict[str, list[int]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, run in work.items():
            started = time.thread_time_ns()
            run()
            if number:  # the first warms up
                times[name].append(time.thread_time_ns() - started)
    return times


if __name__ == "__main__":
    for line in rows("--quick" in sys.argv):
        print(json.dumps(line), flush=True)

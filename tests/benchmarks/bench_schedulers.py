"""Schedulers over an emulated DMA engine and over real transports, against each other and the ideal bound.

Figures are forwards per second. Compute is a sleep, since on these two cores a computing engine and a copying
transport would compete for cores, and the schedulers would be compared by that.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import (
    Allocate,
    Arena,
    CpuStream,
    ForwardPass,
    HostStream,
    Transport,
    allocate_zeroed,
)
from tests.benchmarks.emulated import BYTES_PER_SECOND, SleepingTransport, ideal, predicted
from tests.benchmarks.rows import Bar, Row, make_row, take_turns
from tests.benchmarks.schedulers import BASELINES, TIMEOUT, Compute, Scheduler, run_forward
from tests.runtime_support import run_processes

SHARES = (0.25, 0.5, 1.0, 2.0)
"""Tb / Tc: seconds of a layer's transfer over seconds of its compute."""

LAYERS, LONGER, ATTENDING = 16, 6e-3, 0.25
"""Layers of the emulated forwards; seconds of the longer of Tb and Tc; share of attention in a layer's compute."""

UNEVEN = (2.5, 0.5, 0.5, 0.5)
"""Sizes of uneven bundles, in turns, over their mean."""

OURS = {
    "on_acquire": (Policy.ON_ACQUIRE, 1),
    "on_release": (Policy.ON_RELEASE, 1),
    "on_release, depth 2": (Policy.ON_RELEASE, 2),
}
REAL = {"gloo": 16 << 20, "shared": 32 << 20}
"""Mean bytes of a bundle over each real transport: 3 to 4 ms each on an idle machine."""

REAL_LAYERS = 8
PAGE = 4096
UNIT = "forwards/s"
EMULATED = "emulated engine"

BOUND = Bar(limit=0.97, sense=">=")
"""Of the ideal bound, for equal layers on the emulated engine."""

NO_WORSE = Bar(limit=0.98, sense=">=")
"""Than the best baseline: on the emulated engine two equal schedulers differ by up to 2 %."""

NO_WORSE_REAL = Bar(limit=0.95, sense=">=")
"""Over real transports, whose speed changes from one forward to the next."""

BETTER = Bar(limit=1.01, sense=">=")
"""Where the recurrence says that the policies differ by more than this."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Layers to run, and what their transfers take (seconds)."""

    name: str
    transfers: Sequence[float]
    computes: Sequence[Compute]
    uneven: bool
    emulated: bool

    def predicted(self, ours: str) -> float:
        """Seconds under a policy of `OURS`, if nothing but transfers and compute took any."""
        policy, depth = OURS[ours]
        return predicted(
            self.transfers,
            [compute.attend for compute in self.computes],
            [compute.rest for compute in self.computes],
            depth=depth,
            on_release=policy is Policy.ON_RELEASE,
        )


def rows(quick: bool) -> list[Row]:
    """Every scheduler of ours against the bound, the baselines and each other."""
    found = []
    for uneven in (False, True):
        for share in SHARES:
            found += _emulated(share, uneven, 5 if quick else 21)
    for kind in REAL:
        for uneven in (False,) if quick else (False, True):
            found += _real(kind, uneven, 5 if quick else 21)
    return found


def _emulated(share: float, uneven: bool, rounds: int) -> list[Row]:
    load = _load(EMULATED, share, uneven, LONGER * min(share, 1.0), LAYERS)
    sizes = [round(seconds * BYTES_PER_SECOND) for seconds in load.transfers]
    schedulers = _schedulers(SleepingTransport(), sizes)
    return _rows(load, take_turns(_ways(schedulers, load), rounds))


def _real(kind: str, uneven: bool, rounds: int) -> list[Row]:
    work = partial(_real_rank, kind=kind, uneven=uneven, rounds=rounds)
    ranks = run_processes(2, work, kind=kind, timeout=TIMEOUT)
    for result in ranks:
        if isinstance(result, Exception):
            raise result
    found = []
    for (load, first), (_, second) in zip(*ranks, strict=True):
        found += _rows(load, {way: list(map(max, first[way], second[way])) for way in first})
    return found


def _real_rank(
    transport: Transport, *, kind: str, uneven: bool, rounds: int
) -> list[tuple[Load, dict[str, list[float]]]]:
    """For each share its load, in this run's own transfer time, and the seconds of each way and round."""
    sizes = [int(weight * REAL[kind]) // PAGE * PAGE for weight in _weights(REAL_LAYERS, uneven)]
    transfer = _seconds_of_a_transfer(transport, REAL[kind])
    schedulers = _schedulers(transport, sizes)
    found = []
    for share in SHARES:
        load = _load(f"{kind} between two processes", share, uneven, transfer, REAL_LAYERS)
        found.append((load, take_turns(_ways(schedulers, load), rounds, together=dist.barrier)))
    return found


def _seconds_of_a_transfer(transport: Transport, nbytes: int) -> float:
    """Rank 0's median, told to the other."""
    view = _allocator(transport)(nbytes).fill_(1)
    taken = take_turns({"transfer": transport.prepare(view, 0)}, 15, together=dist.barrier)
    median = torch.tensor(statistics.median(taken["transfer"]), dtype=torch.float64)
    dist.broadcast(median, 0)
    return float(median)


def _schedulers(transport: Transport, sizes: Sequence[int]) -> dict[str, Scheduler]:
    """Baselines and ours, over the same transport and storage for bundles of `sizes` bytes."""
    arenas = {depth: _arena(transport, sizes, depth) for depth in (1, 2)}
    transfers = [
        transport.prepare(arenas[1].cache(i), arenas[1].plan.owners[i]) for i in range(len(sizes))
    ]
    schedulers = {name: make(transfers) for name, make in BASELINES.items()}
    for name, (policy, depth) in OURS.items():
        schedulers[name] = ForwardPass(
            arena=arenas[depth],
            transport=transport,
            compute=HostStream(COMPUTE_STREAM, timeout=TIMEOUT),
            transfer=CpuStream(TRANSFER_STREAM, timeout=TIMEOUT),
            policy=policy,
        )
    return schedulers


def _arena(transport: Transport, sizes: Sequence[int], depth: int) -> Arena:
    specs = [
        CacheSpec(
            layer=f"layers.{i}", index=i, components=(Component(name="main", bytes_per_block=size),)
        )
        for i, size in enumerate(sizes)
    ]
    plan = plan_stage(specs, ranks=transport.size, depth=depth)
    return Arena(plan, rank=transport.rank, num_blocks=1, allocate=_allocator(transport))


def _allocator(transport: Transport) -> Allocate:
    """Of memory that `transport` can send from."""
    return getattr(transport, "allocate", allocate_zeroed)


def _ways(schedulers: dict[str, Scheduler], load: Load) -> dict[str, Callable[[], None]]:
    return {
        name: partial(run_forward, scheduler, load.computes) for name, scheduler in schedulers.items()
    }


def _rows(load: Load, seconds: dict[str, list[float]]) -> list[Row]:
    """Everything against the bound; ours against the best baseline; one policy against the other."""
    rates = {way: [1 / taken for taken in found] for way, found in seconds.items()}
    found = _against_the_bound(load, rates) if load.emulated else _against_serial(load, rates)
    best = max(BASELINES, key=lambda way: statistics.median(rates[way]))
    for way in OURS:
        name = f"{load.name}: {way} against the best baseline ({best})"
        bar = NO_WORSE if load.emulated else NO_WORSE_REAL
        found.append(make_row(name, UNIT, rates[way], rates[best], bar=bar))
    gain = load.predicted("on_acquire") / load.predicted("on_release")
    name = f"{load.name}: on_release against on_acquire (recurrence: {gain:.3f})"
    bar = BETTER if load.emulated and gain > BETTER.limit else None
    found.append(make_row(name, UNIT, rates["on_release"], rates["on_acquire"], bar=bar))
    return found


def _against_the_bound(load: Load, rates: dict[str, list[float]]) -> list[Row]:
    """Every scheduler, ours held to the bar where layers are equal."""
    bound = 1 / ideal(load.transfers, [compute.seconds for compute in load.computes])
    found = []
    for way, of_way in rates.items():
        bar = BOUND if way in OURS and not load.uneven else None
        name = f"{load.name}: {way} against the ideal bound"
        found.append(make_row(name, UNIT, of_way, [bound] * len(of_way), bar=bar))
    return found


def _against_serial(load: Load, rates: dict[str, list[float]]) -> list[Row]:
    """What overlapping wins at all; a bound would need a transfer time that does not change."""
    return [
        make_row(f"{load.name}: {way} against serial", UNIT, rates[way], rates["serial"]) for way in OURS
    ]


def _load(name: str, share: float, uneven: bool, transfer: float, layers: int) -> Load:
    """Layers whose mean transfer takes `transfer` seconds and a `share` of the compute."""
    compute = transfer / share
    layer = Compute(attend=ATTENDING * compute, rest=(1 - ATTENDING) * compute)
    shape = "uneven layers" if uneven else "equal layers"
    return Load(
        name=f"{name}, {shape}, Tb/Tc {share:g}",
        transfers=[transfer * weight for weight in _weights(layers, uneven)],
        computes=[layer] * layers,
        uneven=uneven,
        emulated=name == EMULATED,
    )


def _weights(layers: int, uneven: bool) -> list[float]:
    return [UNEVEN[i % len(UNEVEN)] if uneven else 1.0 for i in range(layers)]

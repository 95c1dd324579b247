"""Recordings in a few sentences: the worst waits, what each cause costs, what to try, and what is not known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpp_dag.trace.overlap import ADVICE, Cause, ForwardOverlap, LayerOverlap, analyze
from kvpp_dag.trace.records import Recording

LITTLE = 0.02
"""Share of the time of forwards below which exposed time is not worth a change."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One exposed wait: of which rank of which stage, in which forward, for which layer."""

    stage: int
    rank: int
    forward: int
    layer: LayerOverlap


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Figures over all forwards of all recordings given; times in nanoseconds.

    `worst` are the longest waits, the longest first, and `totals` the exposed time of each cause that occurs,
    the most expensive first. `bytes` were sent, each broadcast counted once for all its ranks; `needed_bytes` is
    what of them the batches' history filled, None unless all recordings tell. `unknown` says in sentences what
    the recordings do not tell.
    """

    forwards: int
    duration_ns: int
    transfer_ns: int
    exposed_ns: int
    bytes: int
    needed_bytes: int | None
    free_transfers_ns: int
    free_compute_ns: int
    worst: tuple[Wait, ...]
    totals: dict[Cause, int]
    advice: str
    unknown: tuple[str, ...]


def explain(recordings: Sequence[Recording], *, waits: int = 10) -> Explanation:
    """Explain the `waits` longest waits of some recordings, and all of them in sums."""
    analyzed = analyze(recordings)
    forwards = [forward for some in analyzed for forward in some]
    every = [
        Wait(stage=recording.stage, rank=recording.rank, forward=forward.number, layer=layer)
        for recording, some in zip(recordings, analyzed, strict=True)
        for forward in some
        for layer in forward.layers
        if layer.exposed_ns > 0
    ]
    totals = _totals(every)
    once = {
        (recording.stage, forward.number): forward
        for recording, some in zip(recordings, analyzed, strict=True)
        for forward in some
    }
    needed = [forward.needed_bytes for forward in once.values()]
    return Explanation(
        forwards=len(forwards),
        duration_ns=sum(forward.duration_ns for forward in forwards),
        transfer_ns=sum(forward.transfer_ns for forward in forwards),
        exposed_ns=sum(forward.exposed_ns for forward in forwards),
        bytes=sum(forward.bytes for forward in once.values()),
        needed_bytes=None if None in needed else sum(n for n in needed if n is not None),
        free_transfers_ns=sum(forward.free_transfers_ns for forward in forwards),
        free_compute_ns=sum(forward.free_compute_ns for forward in forwards),
        worst=tuple(sorted(every, key=lambda wait: -wait.layer.exposed_ns)[:waits]),
        totals=totals,
        advice=_advice(forwards, totals),
        unknown=(*_unknown(recordings), *untold(recordings), *_unneeded(forwards)),
    )


def _totals(waits: Sequence[Wait]) -> dict[Cause, int]:
    totals: dict[Cause, int] = {}
    for wait in waits:
        for part in wait.layer.parts:
            totals[part.cause] = totals.get(part.cause, 0) + part.ns
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _advice(forwards: Sequence[ForwardOverlap], totals: dict[Cause, int]) -> str:
    """One sentence: whether there is anything to win, and what to try first."""
    duration = sum(forward.duration_ns for forward in forwards)
    exposed = sum(totals.values())
    if not any(forward.layers for forward in forwards):
        return "Nothing was transferred, so there is nothing to hide."
    if exposed < LITTLE * duration:
        return f"Compute waited for {100 * exposed / duration:.1f} % of the time, so there is little to win."
    cause, most = next(iter(totals.items()))
    return (
        f"Compute waited for {100 * exposed / duration:.1f} % of the time, {100 * most / exposed:.0f} % of that "
        f"because of '{cause}': {ADVICE[cause]}."
    )


def _unknown(recordings: Sequence[Recording]) -> Iterator[str]:
    """What is missing in the recordings, a sentence each."""
    for stage in sorted({recording.stage for recording in recordings}):
        some = [recording for recording in recordings if recording.stage == stage]
        given = {recording.rank for recording in some}
        missing = [rank for rank in range(max(r.ranks for r in some)) if rank not in given]
        if missing:
            yield (
                f"No recording of rank {_listed(missing)} of stage {stage} was given, so waits for a peer that "
                "came late count as a slow link."
            )
        if len({recording.clock for recording in some}) > 1:
            yield (
                f"The recordings of stage {stage} were taken with different clocks, so their times are not "
                "compared, and waits for a peer that came late count as a slow link."
            )
        if any(recording.plan is None for recording in some):
            yield f"A recording of stage {stage} holds no plan, so its layers have no names."
        unfinished = sorted(
            {
                f.number
                for recording in some
                for f in recording.forwards
                if f.error is not None or not f.ended
            }
        )
        if unfinished:
            yield f"Forward {_listed(unfinished)} of stage {stage} failed or was in flight, so its times are partial."


def untold(recordings: Sequence[Recording]) -> Iterator[str]:
    """What a device did not tell of its times, a sentence for each stage of which something is missing."""
    for stage in sorted({recording.stage for recording in recordings}):
        some = [f for recording in recordings if recording.stage == stage for f in recording.forwards]
        if count := sum(forward.missing for forward in some):
            numbers = sorted({forward.number for forward in some if forward.missing})
            yield (
                f"The device did not tell {count} times of forward {_listed(numbers)} of stage {stage}: it had "
                "failed, or was not there yet when it was asked. What began or ended at them is left out."
            )


def _unneeded(forwards: Sequence[ForwardOverlap]) -> Iterator[str]:
    if any(forward.layers and forward.needed_bytes is None for forward in forwards):
        yield "How many of the bytes sent the batches needed was not recorded."


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown

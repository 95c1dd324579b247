"""Which rank owns which layer: contiguous, balanced partitions of a stage."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate, pairwise

from kvpp_dag.errors import ConfigError


class Ownership(StrEnum):
    """What a partition balances over the ranks: the number of layers, or the bytes of their bundles."""

    COUNT = "count"
    BYTES = "bytes"


def partition(layers: int, ranks: int) -> tuple[range, ...]:
    """Split ordinals `0..layers-1` into `ranks` contiguous ranges of nearly equal length.

    The first `layers % ranks` ranges are one longer (row P1 of the requirements). With more ranks
    than layers the last ranges are empty. Raises ConfigError if `ranks < 1` or `layers < 0`.
    """
    _check_ranks(ranks)
    if layers < 0:
        raise ConfigError(f"A stage has {layers} layers; expected zero or more.")
    base, extra = divmod(layers, ranks)
    ranges: list[range] = []
    start = 0
    for rank in range(ranks):
        stop = start + base + (1 if rank < extra else 0)
        ranges.append(range(start, stop))
        start = stop
    return tuple(ranges)


def partition_bytes(sizes: Sequence[int], ranks: int) -> tuple[range, ...]:
    """Split the ordinals of bundles of `sizes` bytes into contiguous ranges with the least worst sum.

    The worst rank's owned bytes decide how many blocks fit, so nothing else is minimised first. Of the
    partitions that reach this minimum the most even one is taken (least sum of squared bytes), and of
    those the one with the longest ranges first; so bundles of one size are split as `partition` does.
    Exact, and integer arithmetic throughout, so every rank arrives at the same. Raises ConfigError if
    `ranks < 1`.
    """
    _check_ranks(ranks)
    ends = [0, *accumulate(sizes)]
    worst = _least_worst(ends, ranks)
    layers = len(sizes)
    # cost[i], choice[r][i]: the least sum of squares of bundles i.. over r ranks, and where the first stops.
    cost: list[int | None] = [None] * layers + [0]
    choice: list[list[int]] = []
    for _ in range(ranks):
        stops, costs = zip(*(_first_stop(ends, cost, i, worst) for i in range(layers + 1)), strict=True)
        choice.append(list(stops))
        cost = list(costs)
    ranges: list[range] = []
    start = 0
    for stops_of_rank in reversed(choice):
        stop = stops_of_rank[start]
        ranges.append(range(start, stop))
        start = stop
    return tuple(ranges)


def owner_of(parts: tuple[range, ...]) -> tuple[int, ...]:
    """Invert a partition: the owner rank of every ordinal, in ordinal order."""
    return tuple(rank for rank, part in enumerate(parts) for _ in part)


def _first_stop(
    ends: Sequence[int], cost: Sequence[int | None], start: int, worst: int
) -> tuple[int, int | None]:
    """Where the range that begins at `start` stops best, given the `cost` of what follows; and the cost."""
    best: int | None = None
    stop = start
    for candidate in range(start, len(ends)):
        owned = ends[candidate] - ends[start]
        if owned > worst:
            break
        after = cost[candidate]
        if after is not None and (best is None or owned**2 + after <= best):
            best, stop = owned**2 + after, candidate
    return stop, best


def _least_worst(ends: Sequence[int], ranks: int) -> int:
    """The least bound that `ranks` contiguous ranges can keep, by bisection; `ends` are running sums."""
    low = max((after - before for before, after in pairwise(ends)), default=0)
    high = ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _ranges_needed(ends, middle) <= ranks:
            high = middle
        else:
            low = middle + 1
    return low


def _ranges_needed(ends: Sequence[int], bound: int) -> int:
    """How many contiguous ranges of at most `bound` bytes cover everything; no bundle is larger."""
    ranges, start = 1, 0
    for before, after in pairwise(ends):
        if after - start > bound:
            ranges, start = ranges + 1, before
    return ranges


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ConfigError(f"A KVPP group has {ranks} ranks; it needs at least one.")

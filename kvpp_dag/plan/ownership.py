"""Which rank owns which layer: contiguous, balanced partitions of a stage."""

from kvpp_dag.errors import ConfigError


def partition(layers: int, ranks: int) -> tuple[range, ...]:
    """Split ordinals `0..layers-1` into `ranks` contiguous ranges of nearly equal length.

    The first `layers % ranks` ranges are one longer (row P1 of the requirements). With more ranks
    than layers the last ranges are empty. Raises ConfigError if `ranks < 1` or `layers < 0`.
    """
    if ranks < 1:
        raise ConfigError(f"A KVPP group has {ranks} ranks; it needs at least one.")
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


def owner_of(parts: tuple[range, ...]) -> tuple[int, ...]:
    """Invert a partition: the owner rank of every ordinal, in ordinal order."""
    return tuple(rank for rank, part in enumerate(parts) for _ in part)

"""One row of a benchmark: a figure, what it is held against, and their ratio over rounds that took turns.

A row is a dict with the keys of `KEYS`, as it stands in bench.json. `spread` are the quartiles of the rounds' ratios.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

KEYS = ("name", "value", "unit", "baseline", "ratio", "bar", "holds", "spread")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a row is expected to reach: its ratio, or its value itself."""

    limit: float
    sense: Literal[">=", "<="]
    of: Literal["ratio", "value"] = "ratio"

    def holds(self, row: Row) -> bool:
        """Whether `row` reaches it."""
        found: float = row[self.of]
        return found >= self.limit if self.sense == ">=" else found <= self.limit

    def __str__(self) -> str:
        return f"{self.of} {self.sense} {self.limit:g}"


def make_row(
    name: str,
    unit: str,
    values: Sequence[float],
    baselines: Sequence[float],
    *,
    bar: Bar | None = None,
) -> Row:
    """The row of two series measured in turns, one item a round; the ratio is the median of value / baseline."""
    ratios = [value / base for value, base in zip(values, baselines, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    row: Row = {
        "name": name,
        "value": rounded(statistics.median(values)),
        "unit": unit,
        "baseline": rounded(statistics.median(baselines)),
        "ratio": rounded(ratio),
        "bar": None if bar is None else str(bar),
        "holds": None,
        "spread": [rounded(low), rounded(high)],
    }
    return row if bar is None else row | {"holds": bar.holds(row)}


def rounded(figure: float) -> float:
    """Four digits: more are noise."""
    return float(f"{figure:.4g}")


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    together: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each way in each round; a round runs every way once, after one round that warms up.

    `together` is called before each run, so that several processes start it at the same time. `clock` gives seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name, run in ways.items():
            if together is not None:
                together()
            began = clock()
            run()
            if number >= 0:
                seconds[name].append(clock() - began)
    return seconds


def check_row(row: Row) -> None:
    """Raise ValueError for a row that has not the shape that bench.json promises.

    A figure without a baseline has no ratio, and the spread of its value.
    """
    if set(row) != set(KEYS):
        raise ValueError(f"A row has the keys {sorted(row)}; expected {sorted(KEYS)}.")
    name, (low, high) = row["name"], row["spread"]
    if (row["bar"] is None) != (row["holds"] is None):
        raise ValueError(f"The row {name!r} has a bar without a verdict, or a verdict without a bar.")
    if (row["baseline"] is None) != (row["ratio"] is None):
        raise ValueError(
            f"The row {name!r} has a baseline without a ratio, or a ratio without a baseline."
        )
    if not low <= high:
        raise ValueError(f"The row {name!r} has a spread from {low} to {high}.")

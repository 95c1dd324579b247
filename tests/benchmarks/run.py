"""Run the benchmarks: `python -m tests.benchmarks.run [--quick] [--only FAMILY ...] [--out FILE] [--page FILE]`."""

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests import runtime_support
from tests.benchmarks.rows import Row, check_row

FAMILIES = ("schedulers", "hotpath", "device", "transports", "payload", "growth", "vllm")
"""The modules `bench_NAME`, each with `rows(quick) -> list[Row]`."""

WIDTH = 150
"""Columns that a table needs."""

PATIENCE = 1800.0
"""Seconds that a rank's process may take, which measures where a test only checks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the families asked for, show a table of each, and write all rows; 1 if a family failed."""
    parser = argparse.ArgumentParser(description="Ratios of runs that take turns in one process tree.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and the smaller cases")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    parser.add_argument("--page", type=Path, help="a page whose tables to replace: docs/performance.md")
    asked = parser.parse_args(arguments)
    runtime_support.PATIENCE = PATIENCE
    console = Console()
    console.width = max(console.width, WIDTH)
    found: dict[str, list[Row]] = {}
    failed = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for family in asked.only:
            task = progress.add_task(family, total=1)
            try:
                found[family] = measured(family, asked.quick)
            except Exception:  # the other families are still worth having
                failed.append(family)
                console.print(traceback.format_exc(), markup=False)
                continue
            finally:
                progress.update(task, completed=1)
            console.print(table(family, found[family]))
    rows = list(chain.from_iterable(found.values()))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(rows, indent=1) + "\n")
    if asked.page is not None:
        asked.page.write_text(with_tables(asked.page.read_text(), found))
    missed = sum(row["holds"] is False for row in rows)
    console.print(f"{len(rows)} rows in {asked.out}; {missed} miss their bar.")
    if failed:
        console.print(f"Failed: {', '.join(failed)}.")
    return bool(failed)


def measured(family: str, quick: bool) -> list[Row]:
    """The rows of one family, each checked."""
    module = importlib.import_module(f"tests.benchmarks.bench_{family}")
    rows: list[Row] = module.rows(quick)
    for row in rows:
        check_row(row)
    return rows


HEADINGS = ("name", "value", "unit", "baseline", "ratio", "spread", "bar", "holds")
MARKS = {True: "yes", False: "no", None: ""}


def table(family: str, rows: Sequence[Row]) -> Table:
    """The rows of a family for a terminal."""
    found = Table(title=family)
    found.add_column("name", overflow="fold", min_width=60)
    for heading in HEADINGS[1:]:
        found.add_column(heading, overflow="fold", justify="right")
    for row in rows:
        found.add_row(*cells(row), style="red" if row["holds"] is False else None)
    return found


def with_tables(page: str, found: Mapping[str, Sequence[Row]]) -> str:
    """`page` with what it has between the marks of each family replaced by what was found."""
    for family, rows in found.items():
        before, mark, rest = page.partition(f"<!-- {family} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        if not end:
            raise ValueError(
                f"The page has no place for {family}: no {mark.strip()} with an end after it."
            )
        page = before + mark + markdown(rows) + end + after
    return page


def markdown(rows: Sequence[Row]) -> str:
    """How many bars hold, the rows that miss theirs, and all rows, folded away."""
    missed = [row for row in rows if row["holds"] is False]
    bars = sum(row["bar"] is not None for row in rows)
    held = f"{bars - len(missed)} of {bars} bars hold."
    open_ = f"{held} Missed:\n\n{lines(missed)}" if missed else f"{held}\n"
    return f"{open_}\n<details><summary>All {len(rows)} rows</summary>\n\n{lines(rows)}\n</details>\n"


def lines(rows: Sequence[Row]) -> str:
    """A table of a page."""
    found = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in found)


def cells(row: Row) -> tuple[str, ...]:
    """What stands under `HEADINGS`."""
    low, high = row["spread"]
    shown = row | {"spread": f"{low:g} to {high:g}", "holds": MARKS[row["holds"]]}
    return tuple("" if shown[key] is None else str(shown[key]) for key in HEADINGS)


if __name__ == "__main__":
    sys.exit(main())

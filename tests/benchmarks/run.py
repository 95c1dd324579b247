"""Run the benchmarks: `python -m tests.benchmarks.run [--quick] [--only FAMILY ...] [--out bench.json]`."""

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests import runtime_support
from tests.benchmarks.rows import Row, check_row

FAMILIES = ("schedulers", "hotpath", "transports", "payload", "growth", "vllm")
"""The modules `bench_NAME`, each with `rows(quick) -> list[Row]`."""

PATIENCE = 1800.0
"""Seconds that a rank's process may take, which measures where a test only checks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the families asked for, show a table of each, and write all rows; 1 if a family failed."""
    parser = argparse.ArgumentParser(description="Ratios of runs that take turns in one process tree.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and the smaller cases")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="FAMILY")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    asked = parser.parse_args(arguments)
    runtime_support.PATIENCE = PATIENCE
    console = Console()
    found: list[Row] = []
    failed = []
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for family in asked.only:
            task = progress.add_task(family, total=1)
            try:
                rows = measured(family, asked.quick)
            except Exception:  # the other families are still worth having
                failed.append(family)
                console.print(traceback.format_exc(), markup=False)
                continue
            finally:
                progress.update(task, completed=1)
            console.print(table(family, rows))
            found += rows
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    missed = sum(row["holds"] is False for row in found)
    console.print(f"{len(found)} rows in {asked.out}; {missed} miss their bar.")
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


def table(family: str, rows: Sequence[Row]) -> Table:
    """The rows of a family as people read them."""
    found = Table(title=family)
    for heading in ("name", "value", "unit", "baseline", "ratio", "quartiles", "bar", "holds"):
        found.add_column(heading, overflow="fold", justify="left" if heading == "name" else "right")
    marks = {True: "[green]yes", False: "[red]no", None: ""}
    for row in rows:
        low, high = row["spread"]
        figures = (row["value"], row["unit"], row["baseline"], row["ratio"], f"{low:g} - {high:g}")
        bar = "" if row["bar"] is None else row["bar"]
        found.add_row(row["name"], *map(str, figures), str(bar), marks[row["holds"]])
    return found


if __name__ == "__main__":
    sys.exit(main())

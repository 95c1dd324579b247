"""`kvpp-dag diff`: what differs between two dumps, and by how much."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpp_dag.cli.dumps import read_any
from kvpp_dag.errors import ConfigError
from kvpp_dag.graph import Graph
from kvpp_dag.graph.diff import Change, GraphDiff, diff_graphs
from kvpp_dag.trace import Recording
from kvpp_dag.trace.diff import Figure, KindDiff, RecordingDiff, diff_recordings

_ROWS = 200
"""Rows of a table in the terminal."""


def diff(
    a: Annotated[Path, typer.Argument(help="A graph, a recording, or a directory of recordings.")],
    b: Annotated[Path, typer.Argument(help="What to compare it with, of the same kind.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; times in nanoseconds.")] = False,
) -> None:
    """Compare two ranks, two runs, two policies or two depths.

    Exit status 0: nothing differs. 1: something does. 2: a file cannot be read.
    """
    left, right = read_any(a), read_any(b)
    graphs: list[GraphDiff] = []
    recordings: list[RecordingDiff] = []
    missing: list[str] = []
    if isinstance(left, Graph) and isinstance(right, Graph):
        graphs = [diff_graphs(left, right)]
    elif isinstance(left, Graph) or isinstance(right, Graph):
        raise ConfigError(f"{a} and {b} are a graph and recordings; compare two of one kind.")
    else:
        pairs, missing = _pairs(left, right)
        recordings = [diff_recordings(x, y) for x, y in pairs]
    found = [*(graph.equal for graph in graphs), *(recording.equal for recording in recordings)]
    equal = not missing and all(found)
    if as_json:
        report = {
            "equal": equal,
            "missing": missing,
            "graphs": [asdict(graph) for graph in graphs],
            "recordings": [asdict(recording) for recording in recordings],
        }
        typer.echo(json.dumps(report, indent=1))
    else:
        _print(graphs, recordings, missing)
        typer.echo("Nothing differs." if equal else "They differ.")
    raise typer.Exit(0 if equal else 1)


def _pairs(
    a: Sequence[Recording], b: Sequence[Recording]
) -> tuple[list[tuple[Recording, Recording]], list[str]]:
    """The recordings to compare: two alone, else those of one stage and rank; and who has no partner."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])], []
    of_a, of_b = ({(r.stage, r.rank): r for r in side} for side in (a, b))
    keys = sorted({*of_a, *of_b})
    missing = [
        f"stage {stage} rank {rank} is only in {'A' if (stage, rank) in of_a else 'B'}"
        for stage, rank in keys
        if (stage, rank) not in of_a or (stage, rank) not in of_b
    ]
    return [(of_a[key], of_b[key]) for key in keys if key in of_a and key in of_b], missing


def _print(
    graphs: Iterable[GraphDiff], recordings: Iterable[RecordingDiff], missing: Iterable[str]
) -> None:
    console = Console()
    for sentence in missing:
        typer.echo(f"The recording of {sentence}.")
    for graph in graphs:
        _print_graphs(console, graph, "")
    for found in recordings:
        who = f"stage {found.stage} rank {found.rank}"
        if found.equal:
            typer.echo(f"{who}: nothing differs.")
        _print_changes(console, found.settings, f"{who}: settings")
        for kind in found.kinds:
            what = f"{who}, forwards {'with' if kind.history else 'without'} history"
            if kind.moves:
                _print_moves(console, kind, what)
            _print_graphs(console, kind.graph, what)


def _print_graphs(console: Console, found: GraphDiff, title: str) -> None:
    prefix = f"{title}: " if title else ""
    _print_changes(console, found.settings, f"{prefix}settings of the graph")
    _print_changes(console, found.changes, f"{prefix}nodes that changed")
    rows = [("node", "A", node) for node in found.nodes_only_a]
    rows += [("node", "B", node) for node in found.nodes_only_b]
    rows += [("edge", "A", " -> ".join(edge)) for edge in found.edges_only_a]
    rows += [("edge", "B", " -> ".join(edge)) for edge in found.edges_only_b]
    _print_table(console, f"{prefix}only in one", ("what", "only in", ""), rows)
    moves = [(m.node, m.stream, m.a or "the begin", m.b or "the begin") for m in found.moves]
    _print_table(console, f"{prefix}order", ("node", "stream", "A: after", "B: after"), moves)


def _print_changes(console: Console, changes: Sequence[Change], title: str) -> None:
    rows = [(c.node or "", c.field, _shown(c.a), _shown(c.b)) for c in changes]
    _print_table(console, title, ("node", "what", "A", "B"), rows)


def _print_moves(console: Console, kind: KindDiff, title: str) -> None:
    rows = [
        (
            "all" if move.layer is None else str(move.layer),
            *(
                _ms(of)
                for figure in (move.start, move.transfer, move.exposed)
                for of in (figure.a, figure.b)
            ),
        )
        for move in kind.moves
    ]
    title = f"{title}: medians in ms; starts count from the begin, that of all is the end"
    columns = [f"{what} {side}" for what in ("start", "transfer", "exposed") for side in "AB"]
    _print_table(console, title, ("layer", *columns), rows)
    for move in kind.moves:
        if move.layer is None:
            figures = {"end": move.start, "transfer": move.transfer, "exposed": move.exposed}
            typer.echo("; ".join(f"{name} {_figure(figure)}" for name, figure in figures.items()))


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> None:
    if not rows:
        return
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows[:_ROWS]:
        table.add_row(*(Text(cell) for cell in row))  # as `Text`, since names may look like markup
    console.print(table)
    if len(rows) > _ROWS:
        typer.echo(f"and {len(rows) - _ROWS} more; --json lists all")


def _shown(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _figure(figure: Figure) -> str:
    """By how much a figure of the whole forward moved."""
    if figure.by is None:
        return "in one only"
    percent = "" if figure.percent is None else f" ({figure.percent:+.1f} %)"
    return f"{figure.by / 1e6:+.3f} ms{percent}"


def _ms(ns: int | None) -> str:
    return "none" if ns is None else f"{ns / 1e6:.3f}"

"""`kvpp-dag export`: recordings in the forms that other tools open."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvpp_dag.cli.dumps import read_any
from kvpp_dag.cli.files import check_new, check_new_directory, write_new, write_new_directory
from kvpp_dag.errors import ConfigError
from kvpp_dag.graph import Graph, to_dot
from kvpp_dag.trace import ForwardRecord, Recording, to_chrome
from kvpp_dag.trace.critical import critical_path
from kvpp_dag.trace.hta import to_hta
from kvpp_dag.trace.mindstudio import FILE_NAME, to_mindstudio
from kvpp_dag.trace.svg import to_svg


class Target(StrEnum):
    """What to export to."""

    CHROME = "chrome"
    HTA = "hta"
    MINDSTUDIO = "mindstudio"
    SVG = "svg"
    DOT = "dot"


_DIRECTORIES = (Target.HTA, Target.MINDSTUDIO)
_DRAWINGS = {Target.SVG: to_svg, Target.DOT: to_dot}


def export(
    path: Annotated[Path, typer.Argument(help="A recording, a directory of them, or a graph to draw.")],
    to: Annotated[Target, typer.Option(help="hta and mindstudio write directories.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new file or directory.")],
    rank: Annotated[
        int | None, typer.Option(help="svg and dot: the rank [the first recording's].")
    ] = None,
    forward: Annotated[
        int | None, typer.Option(help="svg and dot: the forward's number [the last with history].")
    ] = None,
) -> None:
    """Write recordings for Perfetto, HTA or MindStudio, or draw a forward with its critical path."""
    if to in _DIRECTORIES:
        check_new_directory(output)
    else:
        check_new(output)
    if to not in _DRAWINGS and (rank, forward) != (None, None):
        raise ConfigError(f"--rank and --forward choose what svg and dot draw; {to} takes all.")
    dump = read_any(path)
    if to in _DRAWINGS:
        write_new(output, _draw(path, dump, to, rank, forward))
        typer.echo(str(output))
        return
    if isinstance(dump, Graph):
        raise ConfigError(f"{path} is a graph, which has no times; {to} needs a recording.")
    if to is Target.CHROME:
        write_new(output, to_chrome(dump))
        typer.echo(f"{output}: open it at ui.perfetto.dev or chrome://tracing")
        return
    files = to_hta(dump) if to is Target.HTA else {FILE_NAME: to_mindstudio(dump).encode()}
    write_new_directory(output, files)
    typer.echo(f"{output}: {', '.join(files)}")


def _draw(
    path: Path, dump: Graph | list[Recording], to: Target, rank: int | None, forward: int | None
) -> str:
    if isinstance(dump, Graph):
        if (rank, forward) != (None, None):
            raise ConfigError(f"{path} is one graph; --rank and --forward choose from recordings.")
        return _DRAWINGS[to](dump)
    record = _chosen(path, dump, rank, forward)
    steps = critical_path(record)
    return _DRAWINGS[to](record.graph, [step.node for step in steps if step.kind is not None])


def _chosen(
    path: Path, recordings: Sequence[Recording], rank: int | None, forward: int | None
) -> ForwardRecord:
    of_rank = next((r for r in recordings if rank is None or r.rank == rank), None)
    if of_rank is None:
        ranks = ", ".join(str(r.rank) for r in recordings)
        raise ConfigError(f"{path} has no recording of rank {rank}; it has those of {ranks}.")
    records = [r for r in of_rank.forwards if forward is None or r.number == forward]
    if not records:
        numbers = (
            f"{of_rank.forwards[0].number} to {of_rank.forwards[-1].number}"
            if of_rank.forwards
            else "none"
        )
        wanted = "any forward" if forward is None else f"forward {forward}"
        raise ConfigError(f"{path} does not hold {wanted} of rank {of_rank.rank}; it holds {numbers}.")
    return next((r for r in reversed(records) if r.graph.history), records[-1])

"""`kvpp-dag report`: recorded forwards as one page that a browser opens from disk."""

from pathlib import Path
from typing import Annotated

import typer

from kvpp_dag.cli.files import check_new, write_new
from kvpp_dag.trace.overlap import analyze
from kvpp_dag.trace.recording import read_recordings
from kvpp_dag.trace.report import to_html


def report(
    path: Annotated[Path, typer.Argument(help="A recording, or a directory with one per rank.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new HTML file.")],
) -> None:
    """Write a page that shows what was hidden, what was exposed, and why."""
    check_new(output)
    recordings = read_recordings(path)
    page = to_html(recordings, analyze(recordings))
    write_new(output, page)
    forwards = len({record.number for recording in recordings for record in recording.forwards})
    typer.echo(
        f"{output}: {forwards} forwards of {len(recordings)} recordings, {len(page.encode()) / 1e6:.1f} MB"
    )

"""Files of a rank in the user's trace directory: graph dumps, recordings and traces.

Names carry stage and rank, and every file is replaced as a whole by the next run that uses the same
directory; nothing else there is touched.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from kvpp_dag.graph import Graph, to_dot, to_json, to_text
from kvpp_dag.runtime.payload import Kind, Way
from kvpp_dag.trace import Recording, to_chrome
from kvpp_dag.trace.recording import to_recording_json


def write_graphs(directory: Path, graphs: Mapping[Kind, Graph], *, name: str) -> list[str]:
    """Write the graph of every kind of forward as text, DOT and JSON; returns the paths."""
    written: list[str] = []
    for (way, chunks), graph in graphs.items():
        kind = {Way.NOTHING: "no-history", Way.FULL: "history"}.get(way, f"{way}-{chunks}")
        for suffix, form in (("txt", to_text), ("dot", to_dot), ("json", to_json)):
            path = directory / f"graph.{name}.{kind}.{suffix}"
            written.append(_write(path, form(graph)))
    return written


def write_trace(directory: Path, recording: Recording, *, name: str) -> str:
    """Write a rank's forwards as a recording and as a Chrome trace; returns the recording's path."""
    _write(directory / f"trace.{name}.json", to_chrome([recording]))
    return _write(directory / f"recording.{name}.json", to_recording_json(recording))


def write_failure(directory: Path, recording: Recording, *, name: str) -> str:
    """Write the last forwards of a rank whose forward failed, as a recording; returns its path."""
    return _write(directory / f"failed.{name}.json", to_recording_json(recording))


def _write(path: Path, text: str) -> str:
    """Write through a neighbour, so that a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return str(path)

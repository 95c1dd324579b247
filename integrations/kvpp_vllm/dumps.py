"""Files of a rank in the user's trace directory: graph dumps and traces.

Names carry stage and rank, and every file is replaced as a whole by the next run that uses the same
directory; nothing else there is touched.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from kvpp_dag.graph import Graph, to_dot, to_json, to_text
from kvpp_dag.trace import ForwardRecord, to_chrome


def write_graphs(directory: Path, graphs: Sequence[Graph], *, name: str) -> list[str]:
    """Write every graph as text, DOT and JSON; returns the paths."""
    written: list[str] = []
    for graph in graphs:
        kind = "history" if graph.history else "no-history"
        for suffix, form in (("txt", to_text), ("dot", to_dot), ("json", to_json)):
            path = directory / f"graph.{name}.{kind}.{suffix}"
            written.append(_write(path, form(graph)))
    return written


def write_trace(directory: Path, records: Sequence[ForwardRecord], *, name: str) -> str:
    """Write recorded forwards as a Chrome trace; returns the path."""
    return _write(directory / f"trace.{name}.json", to_chrome([records]))


def _write(path: Path, text: str) -> str:
    """Write through a neighbour, so that a reader never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return str(path)

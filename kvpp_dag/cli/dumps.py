"""Reading dumps of either kind: recordings, and graphs in text or JSON form."""

from pathlib import Path

from kvpp_dag.errors import DumpError
from kvpp_dag.graph import Graph, from_json, from_text
from kvpp_dag.trace import Recording
from kvpp_dag.trace.files import read_dump
from kvpp_dag.trace.recording import is_recording, read_recordings, recording_from


def read_graph(path: Path) -> Graph:
    """The graph in a text or JSON dump. Raises DumpError naming the file and the place."""
    return graph_from(path, read_dump(path))


def graph_from(path: Path, text: str) -> Graph:
    """The graph in `text`, which is the content of `path`."""
    try:
        return from_json(text) if text.lstrip().startswith("{") else from_text(text)
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error


def read_any(path: Path) -> Graph | list[Recording]:
    """A graph, or the recordings of a file or directory. Raises DumpError naming the file and the place."""
    if path.is_dir():
        return read_recordings(path)
    text = read_dump(path)
    return [recording_from(path, text)] if is_recording(text) else graph_from(path, text)

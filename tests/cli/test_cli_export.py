"""`kvpp-dag export` as a user types it: what it writes, and what it refuses."""

import gzip
import json
from xml.etree import ElementTree

import pytest

from kvpp_dag.graph import to_dot, to_json
from kvpp_dag.trace import to_chrome
from kvpp_dag.trace.critical import critical_path
from kvpp_dag.trace.hta import to_hta
from kvpp_dag.trace.recording import to_recording_json
from tests.cli.commands import kvpp_dag
from tests.trace.timelines import Timeline

RECORDINGS = Timeline(layers=4, ranks=2, transfer=12).recordings(number=7)


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    for recording in RECORDINGS:
        content = to_recording_json(recording).encode()
        (path / f"recording.stage0.rank{recording.rank}.json.gz").write_bytes(gzip.compress(content))
    return path


def export(path, target, out, *more):
    done = kvpp_dag("export", path, "--to", target, "-o", out, *more)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_chrome(directory, tmp_path):
    out = tmp_path / "new" / "trace.json"
    assert "ui.perfetto.dev" in export(directory, "chrome", out)
    assert out.read_text() == to_chrome(RECORDINGS)
    assert out.read_text() != to_chrome(RECORDINGS[:1])


def test_one_file(directory, tmp_path):
    export(directory / "recording.stage0.rank1.json.gz", "chrome", tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text() == to_chrome(RECORDINGS[1:])


def test_hta(directory, tmp_path):
    assert "rank1_trace.json.gz" in export(directory, "hta", tmp_path / "hta")
    written = {path.name: path.read_bytes() for path in (tmp_path / "hta").iterdir()}
    assert written == to_hta(RECORDINGS)


def test_mindstudio(directory, tmp_path):
    export(directory, "mindstudio", tmp_path / "ms")
    (path,) = (tmp_path / "ms").iterdir()
    assert path.name == "trace_view.json"
    assert json.loads(path.read_text()) == json.loads(to_chrome(RECORDINGS))["traceEvents"]


def test_dot_marks_the_critical_path(directory, tmp_path):
    export(directory, "dot", tmp_path / "a.dot", "--rank", 1, "--forward", 7)
    record = RECORDINGS[1].forwards[0]
    path = [step.node for step in critical_path(record) if step.kind is not None]
    assert (tmp_path / "a.dot").read_text() == to_dot(record.graph, path) != to_dot(record.graph)


def test_svg_is_a_picture_of_all_nodes(directory, tmp_path):
    export(directory, "svg", tmp_path / "a.svg")
    picture = (tmp_path / "a.svg").read_text()
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert all(node.id in picture for node in RECORDINGS[0].forwards[0].graph.nodes)


@pytest.mark.parametrize("target", ["dot", "svg"])
def test_a_graph_can_be_drawn(target, tmp_path):
    graph = RECORDINGS[0].forwards[0].graph
    (tmp_path / "graph.json").write_text(to_json(graph))
    export(tmp_path / "graph.json", target, tmp_path / "out")
    assert "broadcast[3]" in (tmp_path / "out").read_text()


@pytest.mark.parametrize("target", ["chrome", "hta", "mindstudio", "svg", "dot"])
def test_nothing_is_overwritten(target, directory, tmp_path):
    out = tmp_path / "out"
    if target in ("hta", "mindstudio"):
        out.mkdir()
        (out / "mine").write_text("mine")
    else:
        out.write_text("mine")
    done = kvpp_dag("export", directory, "--to", target, "-o", out)
    assert done.returncode == 2
    assert "is not overwritten" in done.stderr
    mine = out / "mine" if out.is_dir() else out
    assert mine.read_text() == "mine"
    assert not out.is_dir() or [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "svg", "--rank", "5"], "no recording of rank 5; it has those of 0, 1"),
        (["--to", "svg", "--forward", "5"], "does not hold forward 5 of rank 0; it holds 7 to 7"),
        (["--to", "chrome", "--rank", "0"], "--rank and --forward"),
        (["--to", "pdf"], "--to"),
    ],
)
def test_what_cannot_be_exported(arguments, words, directory, tmp_path):
    done = kvpp_dag("export", directory, *arguments, "-o", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_graph_has_no_times(tmp_path):
    (tmp_path / "graph.json").write_text(to_json(RECORDINGS[0].forwards[0].graph))
    done = kvpp_dag("export", tmp_path / "graph.json", "--to", "hta", "-o", tmp_path / "out")
    assert done.returncode == 2
    assert "which has no times" in done.stderr

"""`kvpp-dag report` as a user types it."""

import re
import subprocess
import sys

import pytest

from kvpp_dag.trace.overlap import analyze
from kvpp_dag.trace.recording import read_recordings, to_recording_json
from kvpp_dag.trace.report import to_html
from tests.trace.report_data import make_recordings


def report(*arguments):
    return subprocess.run(
        [sys.executable, "-c", "from kvpp_dag.cli import main; main()", "report", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def trace_dir(tmp_path):
    directory = tmp_path / "trace"
    directory.mkdir()
    for recording in make_recordings():
        path = directory / f"recording.stage0.rank{recording.rank}.json"
        path.write_text(to_recording_json(recording))
    return directory


def test_a_directory_becomes_one_page_and_is_not_overwritten(trace_dir, tmp_path):
    output = tmp_path / "new" / "report.html"
    done = report(trace_dir, "-o", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        rf"{re.escape(str(output))}: 3 forwards of 2 recordings, \d+\.\d MB\n", done.stdout
    )
    recordings = read_recordings(trace_dir)
    assert output.read_text() == to_html(recordings, analyze(recordings))
    assert sorted(path.name for path in trace_dir.iterdir()) == [
        "recording.stage0.rank0.json",
        "recording.stage0.rank1.json",
    ]
    before = output.read_bytes()
    again = report(trace_dir, "-o", output)
    assert again.returncode == 2
    assert "is not overwritten" in again.stderr
    assert output.read_bytes() == before


def test_one_recording_becomes_a_page(trace_dir, tmp_path):
    output = tmp_path / "report.html"
    done = report(trace_dir / "recording.stage0.rank1.json", "-o", output)
    assert "3 forwards of 1 recordings" in done.stdout
    assert output.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "holds no recording"), ("{", "recording.x.json"), ('{"kind": "x"}', "recording.x.json")],
)
def test_bad_input_is_one_sentence_and_leaves_no_file(tmp_path, content, words):
    directory = tmp_path / "trace"
    directory.mkdir()
    if content is not None:
        (directory / "recording.x.json").write_text(content)
    done = report(directory, "-o", tmp_path / "report.html")
    assert done.returncode == 2
    assert done.stderr.startswith("kvpp-dag: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_the_output_must_be_named(trace_dir):
    done = report(trace_dir)
    assert done.returncode == 2
    assert "--output" in done.stderr

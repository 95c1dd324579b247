"""`kvpp-dag diff` as a user types it."""

import json

import pytest

from kvpp_dag.graph import Policy, to_json, to_text
from kvpp_dag.trace.recording import to_recording_json
from tests.builders import forward
from tests.cli.commands import kvpp_dag
from tests.trace.timelines import Timeline


@pytest.fixture
def files(tmp_path):
    """Writes contents to numbered files."""

    def write(*contents):
        paths = [tmp_path / f"dump{i}" for i in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_text(content)
        return paths

    return write


def words(done):
    return " ".join(done.stdout.split())


def test_equal_graphs_in_two_forms(files):
    done = kvpp_dag("diff", *files(to_json(forward(4)), to_text(forward(4))))
    assert (done.returncode, done.stdout, done.stderr) == (0, "Nothing differs.\n", "")


def test_graphs_of_two_policies(files):
    paths = files(to_json(forward(4)), to_text(forward(4, policy=Policy.ON_RELEASE)))
    done = kvpp_dag("diff", *paths)
    assert (done.returncode, done.stderr) == (1, "")
    for word in ("policy", "on_acquire", "on_release", "ready[2]", "attend[0]", "They differ."):
        assert word in done.stdout
    report = json.loads(kvpp_dag("diff", *paths, "--json").stdout)
    assert report["equal"] is False
    assert report["graphs"][0]["settings"] == [
        {"field": "policy", "a": "on_acquire", "b": "on_release", "node": None}
    ]


def recording(**settings):
    return to_recording_json(Timeline(layers=5, **settings).recordings()[0])


def test_equal_recordings(files):
    done = kvpp_dag("diff", *files(recording(), recording()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["stage 0 rank 0: nothing differs.", "Nothing differs."]


def test_a_slower_layer_by_how_much(files):
    paths = files(
        recording(transfer=5_000_000), recording(transfer=5_000_000, transfers={3: 10_000_000})
    )
    done = kvpp_dag("diff", *paths)
    assert done.returncode == 1
    assert "transfer +5.000 ms (+20.0 %)" in words(done)
    assert "│ 3     │ " in done.stdout
    assert " 5.000      │ 10.000 " in done.stdout
    report = json.loads(kvpp_dag("diff", *paths, "--json").stdout)
    (kind,) = report["recordings"][0]["kinds"]
    moved = {move["layer"]: move for move in kind["moves"]}
    assert moved[3]["transfer"] == {"a": 5_000_000, "b": 10_000_000}
    assert 2 not in moved


def test_directories_are_compared_rank_by_rank(tmp_path):
    for name, ranks in (("a", (0, 1)), ("b", (1,))):
        (tmp_path / name).mkdir()
        for rank in ranks:
            text = to_recording_json(Timeline(layers=3).recordings()[rank])
            (tmp_path / name / f"recording.rank{rank}.json").write_text(text)
    done = kvpp_dag("diff", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1
    assert "stage 0 rank 0 is only in A" in done.stdout
    assert "stage 0 rank 1: nothing differs" in done.stdout
    assert kvpp_dag("diff", tmp_path / "a", tmp_path / "a").returncode == 0


def test_a_graph_and_a_recording_cannot_be_compared(files):
    done = kvpp_dag("diff", *files(to_json(forward(4)), recording()))
    assert (done.returncode, done.stdout) == (2, "")
    assert "compare two of one kind" in done.stderr


def test_names_are_shown_as_they_are(files):
    text = recording().replace("layers.3", "[red]3[/red]")
    done = kvpp_dag("diff", *files(text, recording()))
    assert done.returncode == 1
    assert "[red]3[/red]" in done.stdout

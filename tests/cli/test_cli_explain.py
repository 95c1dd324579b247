"""`kvpp-dag explain` as a user types it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpp_dag.graph import Policy
from kvpp_dag.plan import StagePlan
from kvpp_dag.trace.recording import to_recording_json
from tests.trace.timelines import Timeline

MS = 1_000_000
SLOW = Timeline(
    layers=12,
    policy=Policy.ON_RELEASE,
    prologue=3 * MS,
    attend=9 * MS,
    compute=1 * MS,
    transfer=4 * MS,
    transfers={5: 16 * MS, 8: 13 * MS},
    computes={(1, 2): 11 * MS},
)


def explain(*arguments: object, columns: int = 140) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvpp_dag.cli import main; main()", "explain", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"COLUMNS": str(columns), "PATH": ""},
    )


def write(directory: Path, timeline: Timeline) -> Path:
    for recording in timeline.recordings(needed_blocks=2):
        path = directory / f"recording.stage0.rank{recording.rank}.json"
        path.write_text(to_recording_json(recording), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("recorded"), SLOW)


def flat(text: str) -> str:
    """The words of a table, whose cells were wrapped."""
    return " ".join(text.replace("│", " ").split())


def test_waits_causes_and_advice_are_printed(recorded):
    done = explain(recorded)
    assert done.returncode == 0, done.stderr
    assert "longest waits" in done.stdout
    assert "a layer is the * of layers.*" in flat(done.stdout)
    assert "scratch slot not free" in done.stdout
    assert "attend[3] held slot 1" in flat(done.stdout)
    assert "a greater prefetch depth" in flat(done.stdout)
    assert "Not known" not in done.stdout


def test_nothing_is_cut_off_in_eighty_columns(recorded):
    done = explain(recorded, columns=80)
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = flat(done.stdout)
    for word in ("exposed", "transfer", "bounds", "with free compute", "needed 50.0 % of it"):
        assert word in words


def test_bytes_are_those_that_were_broadcast(recorded):
    one, both = (
        json.loads(explain(path, "--json").stdout)
        for path in (recorded / "recording.stage0.rank0.json", recorded)
    )
    assert one["bytes"] == both["bytes"] > one["needed_bytes"] == both["needed_bytes"] > 0
    assert both["transfer_ns"] > one["transfer_ns"]


def test_names_that_differ_in_more_than_a_number_stay_whole(tmp_path):
    recording = SLOW.recordings()[0]
    path = tmp_path / "recording.json"
    path.write_text(to_recording_json(recording).replace('"layers.5"', '"dense.5"'), encoding="utf-8")
    done = explain(path)
    assert "dense.5" in done.stdout
    assert "a layer is" not in done.stdout


def test_a_healthy_run_has_little_to_win(tmp_path):
    done = explain(write(tmp_path, Timeline(layers=20, transfer=4)))
    assert "little to win" in done.stdout
    assert "scratch slot not free" not in done.stdout


def test_one_file_says_that_its_peer_is_missing(recorded):
    done = explain(recorded / "recording.stage0.rank0.json")
    assert "No recording of rank 1 of stage 0" in flat(done.stdout)
    assert "peer late" not in done.stdout


def test_json_says_the_same(recorded):
    report = json.loads(explain(recorded, "--json").stdout)
    worst = report["worst"]
    assert len(worst) <= 10
    assert worst[0]["exposed_ns"] == max(wait["exposed_ns"] for wait in worst)
    for wait in worst:
        assert sum(part["ns"] for part in wait["causes"]) == wait["exposed_ns"]
    assert sum(total["ns"] for total in report["totals"]) == report["exposed_ns"]
    assert report["unknown"] == []
    assert {"cause", "ns", "try"} <= set(report["totals"][0])
    (slot,) = (w for w in worst if (w["rank"], w["layer"]) == (1, 5))
    assert (slot["name"], slot["owner"], slot["needed_bytes"]) == ("layers.5", 0, 2 * 8)


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path):
    recording = SLOW.recordings()[0]
    assert isinstance(recording.plan, StagePlan)
    first, *others = recording.plan.bundles
    hostile = "[red]x[/] [link=http://a]b"
    bundles = (replace(first, spec=replace(first.spec, layer=hostile)), *others)
    path = tmp_path / "recording.json"
    named = replace(recording, plan=replace(recording.plan, bundles=bundles))
    path.write_text(to_recording_json(named), encoding="utf-8")
    done = explain(path)
    assert done.returncode == 0, done.stderr
    assert "[red]x[/]" in flat(done.stdout)


@pytest.mark.parametrize("content", [None, "", "{}", "nonsense", "[1, 2]"])
def test_what_is_no_recording_is_one_sentence(tmp_path, content):
    path = tmp_path / "recording.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    done = explain(path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_an_empty_directory_is_one_sentence(tmp_path):
    done = explain(tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)

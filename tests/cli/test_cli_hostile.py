"""Every command that reads a dump, on dumps that were broken or made to hurt: one sentence, status 2, within limits.

The limits are those of the operating system, set for the command's process: address space and CPU time.
"""

import gzip
import json
import resource
import subprocess
import sys
from functools import partial

import pytest

from kvpp_dag.graph import to_json
from kvpp_dag.trace.recording import to_recording_json
from tests.builders import forward
from tests.trace.timelines import Timeline

MEMORY = 2 << 30
"""Bytes of address space; the interpreter with its libraries takes up to 0.6 GB of them."""

CPU_SECONDS = 60

COMMANDS = {
    "explain": ["explain", "{dump}"],
    "report": ["report", "{dump}", "-o", "{out}"],
    "chrome": ["export", "{dump}", "--to", "chrome", "-o", "{out}"],
    "hta": ["export", "{dump}", "--to", "hta", "-o", "{out}"],
    "svg": ["export", "{dump}", "--to", "svg", "-o", "{out}"],
    "diff": ["diff", "{dump}", "{dump}"],
    "verify": ["verify", "{dump}"],
}


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


PROGRAM = """
import contextlib, io, json, sys
from kvpp_dag.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["kvpp-dag", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exit:
            status = exit.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def run(commands, dump, out):
    """Run commands on a dump one after the other in one limited process; status, stdout and stderr of each."""
    arguments = [
        [word.format(dump=dump, out=f"{out}-{name}") for word in COMMANDS[name]] for name in commands
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        preexec_fn=limited,
    )
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stderr[-2000:])
    results = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip(commands, results, strict=True))


def recording():
    return json.loads(to_recording_json(Timeline(layers=3).recordings()[1]))


def graph():
    return json.loads(to_json(forward(3)))


def write_json(data, path):
    path.write_text(json.dumps(data))


def recording_with(**fields):
    return partial(write_json, recording() | fields)


def forward_with(**fields):
    data = recording()
    data["forwards"][0] |= fields
    return partial(write_json, data)


def graph_with(**fields):
    data = graph()
    data["graph"] |= fields
    return partial(write_json, data)


def ring(path):
    data = recording()
    data["graphs"][0]["graph"]["edges"].append({"source": "attend[2]", "target": "ready[0]"})
    write_json(data, path)


def bomb(path):
    with gzip.open(path, "wb") as packed:
        for _ in range(1024):
            packed.write(b"[" * (1 << 20))


NODE = {"id": "<script>alert(1)</script>", "kind": "compute", "stream": "compute"}

HOSTILE = {
    "empty": lambda path: path.write_text(""),
    "cut short": lambda path: path.write_text(json.dumps(recording())[:-100]),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "gzip cut short": lambda path: path.write_bytes(
        gzip.compress(json.dumps(recording()).encode())[:-9]
    ),
    "gzip bomb": bomb,
    "sparse file": lambda path: path.open("wb").truncate(1 << 40),
    "deep": lambda path: path.write_text("[" * 1_000_000),
    "arrays": lambda path: path.write_text("[" + "[]," * 16_000_000 + "[]]"),
    "objects": lambda path: path.write_text("[" + "{}," * 2_900_000 + "{}]"),
    "keys": lambda path: path.write_text("{" + ",".join(f'"k{i}":0' for i in range(2_000_000)) + "}"),
    "one string": lambda path: path.write_text('"' + "x" * (60 << 20) + '"'),
    "a key twice": lambda path: path.write_text('{"kind":"kvpp recording","rank":0,"rank":1}'),
    "missing fields": lambda path: path.write_text('{"schema_version":1,"kind":"kvpp recording"}'),
    "NaN": forward_with(began=float("nan")),
    "infinity": forward_with(began=float("inf")),
    "negative time": forward_with(began=-1),
    "huge time": forward_with(ended=10**400),
    "backwards": forward_with(spans=[["prologue", 9, 3]]),
    "unknown node": forward_with(spans=[["nobody", 3, 9]]),
    "wrong types": forward_with(spans="prologue"),
    "many forwards": recording_with(forwards=[{}] * 1_000_000),
    "ring": ring,
    "clock with escapes": recording_with(clock="\x1b]0;pwned\x07"),
    "graph with markup": graph_with(nodes=[NODE], edges=[]),
    "graph with unknown nodes": graph_with(edges=[{"source": "a", "target": "b"}]),
    "graph of a million nodes": graph_with(
        nodes=[{"id": f"n{i}", "kind": "compute", "stream": "compute"} for i in range(1_000_000)],
        edges=[],
    ),
    "recording of a million nodes": recording_with(
        graphs=[
            graph() | {"graph": {"nodes": [{"id": "n", "kind": "compute"}] * 1_000_000, "edges": []}}
        ]
    ),
    "recording of as many nodes as are read": recording_with(
        graphs=[graph() | {"graph": {"nodes": [{"id": "n"}] * 199_000, "edges": []}}]
    ),
    "text of a million nodes": lambda path: path.write_text(
        "# kvpp graph rank=0 ranks=1 layout=- history=true policy=on_acquire depth=1\n"
        + "\n".join(f"n{i}" for i in range(1_000_000))
    ),
}


WRITING = ["report", "chrome", "hta", "svg"]


def test_good_dumps_are_read_within_the_limits(tmp_path):
    """The control: the limits do not refuse what should be read."""
    dump = tmp_path / "dump.json"
    write_json(recording(), dump)
    for status, _, err in run(["explain", "diff", *WRITING], dump, tmp_path / "out").values():
        assert (status, err) == (0, "")
    write_json(graph(), dump)
    for status, _, err in run(["verify", "diff"], dump, tmp_path / "out").values():
        assert (status, err) == (0, "")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_dump_is_one_sentence_and_status_2(name, tmp_path):
    check_refused(name, ["explain", "diff", "verify"], tmp_path)


@pytest.mark.parametrize("name", ["cut short", "gzip bomb", "arrays", "ring"])
def test_commands_that_write_leave_nothing_behind(name, tmp_path):
    check_refused(name, WRITING, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["dump.json"]


def check_refused(name, commands, tmp_path):
    dump = tmp_path / "dump.json"
    HOSTILE[name](dump)
    for command, (status, out, err) in run(commands, dump, tmp_path / "out").items():
        assert status == 2, (command, err[-500:])
        assert err.startswith("kvpp-dag: ")
        assert err.count("\n") == 1
        assert err.rstrip("\n").isprintable()
        assert len(err) < 1000
        assert out == ""


def test_a_device_that_never_ends_is_refused(tmp_path):
    ((status, _, err),) = run(["explain"], "/dev/zero", tmp_path / "out").values()
    assert status == 2
    assert "not a regular file" in err


def test_the_limits_are_in_force(tmp_path):
    """Without them these tests would show nothing about memory."""
    done = subprocess.run(
        [sys.executable, "-c", f"bytearray({MEMORY})"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited,
    )
    assert "MemoryError" in done.stderr


def dense(streams):
    """As many nodes as a graph may have, each touching one buffer."""
    nodes = [
        {
            "id": f"n{i}",
            "kind": "compute",
            "stream": f"s{i}" if streams else "compute",
            "layer": 0,
            "reads": ["a"],
            "writes": ["a"],
        }
        for i in range(20_000)
    ]
    return graph_with(nodes=nodes, edges=[])


@pytest.mark.parametrize("streams", [False, True])
def test_the_largest_graph_is_judged_within_the_limits(streams, tmp_path):
    dump = tmp_path / "dump.json"
    dense(streams)(dump)
    ((status, out, err),) = run(["verify"], dump, tmp_path / "out").values()
    assert (status, err) == (int(streams), "")
    assert ("at least 1000 findings" in out) == streams

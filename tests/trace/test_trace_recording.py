"""The file form of recordings: what is written comes back, and what somebody made up is refused with its place."""

import gzip
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given

from kvpp_dag.errors import DumpError
from kvpp_dag.trace import Span
from kvpp_dag.trace.files import MAX_DUMP_BYTES, read_dump
from kvpp_dag.trace.recording import (
    from_recording_json,
    is_recording,
    read_recordings,
    to_recording_json,
)
from tests.graph.graph_strategies import HOSTILE
from tests.trace.recordings import changed, odd_recordings, real_recordings
from tests.trace.timelines import Timeline


@pytest.fixture(scope="module")
def real():
    return real_recordings()


def test_real_recordings_come_back_equal(real):
    for recording in real:
        text = to_recording_json(recording)
        assert from_recording_json(text) == recording
        assert to_recording_json(from_recording_json(text)) == text
    assert real[0] != real[1]


@given(odd_recordings())
def test_any_recording_comes_back_equal(recording):
    assert from_recording_json(to_recording_json(recording)) == recording


def test_another_recording_has_another_file(real):
    recording = real[0]
    record = recording.forwards[1]
    node = next(iter(record.spans))
    later = record.spans | {node: Span(record.spans[node].start, record.spans[node].end + 1)}
    for other in (
        replace(recording, clock="another"),
        replace(recording, plan=None),
        replace(recording, forwards=recording.forwards[:-1]),
        changed(recording, record.number, spans=later),
        changed(recording, record.number, error="it failed"),
    ):
        text = to_recording_json(other)
        assert text != to_recording_json(recording)
        assert from_recording_json(text) == other


def test_equal_graphs_are_written_once(real):
    recording = real[0]
    once = json.loads(to_recording_json(recording))
    assert len({id(record.graph) for record in recording.forwards}) >= 2
    assert len(once["graphs"]) == 2  # with history and without
    copies = tuple(replace(r, graph=replace(r.graph)) for r in recording.forwards)
    assert to_recording_json(replace(recording, forwards=copies)) == to_recording_json(recording)
    read = from_recording_json(to_recording_json(recording))
    assert len({id(record.graph) for record in read.forwards}) == 2


def test_a_recording_is_told_from_a_graph(real):
    text = to_recording_json(real[0])
    assert is_recording(text)
    assert is_recording(json.dumps(json.loads(text), sort_keys=True))
    assert not is_recording(json.dumps(json.loads(text)["graphs"][0]))


def dump():
    """The file of a small recording as plain data."""
    return json.loads(to_recording_json(Timeline(layers=3).recordings(needed_blocks=2)[1]))


def setting(*path, value):
    def change(data):
        *parents, last = path
        for key in parents:
            data = data[key]
        data[last] = value

    return change


def without(*path):
    def change(data):
        *parents, last = path
        for key in parents:
            data = data[key]
        del data[last]

    return change


def ring(data):
    data["graphs"][0]["graph"]["edges"].append({"source": "attend[2]", "target": "ready[0]"})


def repeated(rows):
    def change(data):
        data["forwards"][0][rows].append(data["forwards"][0][rows][0])

    return change


SPAN = ("forwards", 0, "spans", 2)
BUNDLE = ("plan", "bundles", 0)

BROKEN = [
    (without("rank"), "rank"),
    (without("graphs"), "graphs"),
    (without("forwards", 0, "waits"), "forwards.0.waits"),
    (without("forwards", 0, "number"), "forwards.0.number"),
    (without("graphs", 0, "graph", "edges"), "graphs.0.graph.edges"),
    (without(*BUNDLE, "components"), "plan.bundles.0.components"),
    (setting("schema_version", value=2), "schema_version"),
    (setting("kind", value="a cake"), "kind"),
    (setting("colour", value="red"), "colour"),
    (setting("rank", value="1"), "rank"),
    (setting("rank", value=2), "rank"),
    (setting("rank", value=-1), "rank"),
    (setting("ranks", value=10**30), "ranks"),
    (setting("ranks", value=3), "plan.ranks"),
    (setting("stage", value=-1), "stage"),
    (setting("clock", value="\x1b[31m"), "clock"),
    (setting("num_blocks", value=-1), "num_blocks"),
    (setting("plan", value=[]), "plan"),
    (setting("plan", "depth", value=0), "plan.depth"),
    (setting("plan", "owners", value=[0]), "plan.owners"),
    (setting("plan", "owners", 1, value=7), "plan.owners.1"),
    (setting(*BUNDLE, "layer", value="a\nb"), "plan.bundles.0.layer"),
    (setting(*BUNDLE, "components", 0, "bytes_per_block", value=0), "plan.bundles.0"),
    (setting("graphs", value=[]), "forwards.0.graph"),
    (setting("graphs", value={}), "graphs"),
    (setting("graphs", 0, "rank", value=0), "graphs.0"),
    (setting("graphs", 0, "graph", "nodes", 1, "layer", value=99), "graphs.0"),
    (setting("graphs", 0, "graph", "nodes", 1, "owner", value=99), "graphs.0"),
    (setting("graphs", 0, "graph", "nodes", 1, "bytes", value=2**64), "graph.nodes.1"),
    (setting("graphs", 0, "graph", "nodes", 1, "reads", value=["a"] * 257), "graph.nodes.1"),
    (setting("graphs", 0, "depth", value=2**64), "the file"),
    (ring, "graphs.0"),
    (setting("forwards", value=None), "forwards"),
    (setting("forwards", 0, value=[]), "forwards.0"),
    (setting("forwards", 0, "graph", value=7), "forwards.0.graph"),
    (setting("forwards", 0, "graph", value=-1), "forwards.0.graph"),
    (setting("forwards", 0, "began", value=-1), "forwards.0.began"),
    (setting("forwards", 0, "began", value=math.nan), "the file"),
    (setting("forwards", 0, "ended", value=1), "forwards.0.ended"),
    (setting("forwards", 0, "ended", value=2**63), "forwards.0.ended"),
    (setting("forwards", 0, "error", value=7), "forwards.0.error"),
    (setting("forwards", 0, "needed_blocks", value=-1), "forwards.0.needed_blocks"),
    (setting("forwards", 0, "sent_blocks", value="2"), "forwards.0.sent_blocks"),
    (setting("forwards", 0, "spans", value={}), "forwards.0.spans"),
    (setting(*SPAN, value=[]), "forwards.0.spans.2"),
    (setting(*SPAN, value=["ready[0]", 1]), "forwards.0.spans.2.2"),
    (setting(*SPAN, value=["ready[0]", 1, 2, 3]), "forwards.0.spans.2"),
    (setting(*SPAN, 0, value="gone"), "forwards.0.spans.2"),
    (setting(*SPAN, 0, value=7), "forwards.0.spans.2.0"),
    (setting(*SPAN, 1, value=2**62), "forwards.0.spans.2"),
    (setting(*SPAN, 1, value=-5), "forwards.0.spans.2.1"),
    (setting(*SPAN, 1, value=1.5), "forwards.0.spans.2.1"),
    (setting(*SPAN, 1, value="1"), "forwards.0.spans.2.1"),
    (setting(*SPAN, 1, value=True), "forwards.0.spans.2.1"),
    (setting(*SPAN, 1, value=None), "forwards.0.spans.2.1"),
    (setting(*SPAN, 1, value=math.inf), "the file"),
    (setting(*SPAN, 2, value=10**400), "forwards.0.spans.2.2"),
    (repeated("spans"), "forwards.0.spans."),
    (repeated("waits"), "forwards.0.waits."),
    (repeated("submitted"), "forwards.0.submitted."),
    (setting("forwards", 0, "waits", 0, 0, value="attend[0]"), "forwards.0.waits"),
    (setting("forwards", 0, "submitted", 0, 0, value="<b>"), "forwards.0.submitted.0"),
]


def test_the_small_recording_can_be_read():
    """The control of the next test."""
    assert len(from_recording_json(json.dumps(dump())).forwards) == 1


@pytest.mark.parametrize(("change", "place"), BROKEN)
def test_a_place_that_cannot_be_read_is_named(change, place):
    data = dump()
    change(data)
    with pytest.raises(DumpError) as caught:
        from_recording_json(json.dumps(data))
    message = str(caught.value)
    assert f"At {place}" in message
    assert message.isprintable()
    assert len(message) < 600


def text_of(data):
    return json.dumps(data, separators=(",", ":"))


TEXTS = {
    "nothing": ("", "line 1 column 1"),
    "null": ("null", "the file"),
    "a list": ("[]", "the file"),
    "two documents": ("{}\n{}", "line 2 column 1"),
    "cut short": (text_of(dump())[:-200], "line 1 column"),
    "a key twice": (
        text_of(dump()).replace('"stage":', '"rank":', 1),
        "'rank' occurs twice|rank occurs twice",
    ),
    "a hostile key": (text_of(dump() | {"<b>\x1b[1m": 1}), r"'<b>\\x1b"),
    "a large exponent": (text_of(dump()).replace('"stage":0', '"stage":1e999'), "stage"),
    "a long number": (text_of(dump()).replace('"stage":0', f'"stage":{"9" * 5000}'), "the file"),
    "a lone surrogate": (text_of(dump()).replace('"a host"', '"\\ud800"'), "clock|the file"),
    "deep arrays": ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "deep objects": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "many keys": ("{" + ",".join(f'"k{i}":0' for i in range(100_000)) + "}", "100000 keys"),
    "many values": ("[" + "0," * 7_000_000 + "0]", "at most 6000000"),
    "many forwards": (text_of(dump() | {"forwards": [[]] * 1_000_000}), r"forwards\.0"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_recording_is_refused(name):
    text, words = TEXTS[name]
    with pytest.raises(DumpError, match=words) as caught:
        from_recording_json(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_do_not_come_in(name):
    data = dump()
    data["graphs"][0]["graph"]["nodes"][0]["stream"] = name
    with pytest.raises(DumpError, match=r"At graph\.nodes\.0: .*name"):
        from_recording_json(json.dumps(data))


def test_forwards_of_a_large_graph_are_counted():
    data = dump()
    nodes = [{"id": f"n{i}", "kind": "compute", "stream": "compute"} for i in range(20_000)]
    data["graphs"][0]["graph"] = {"nodes": nodes, "edges": []}
    empty = data["forwards"][0] | {"submitted": [], "spans": [], "waits": []}
    data["forwards"] = [empty] * 100
    assert len(from_recording_json(json.dumps(data)).forwards) == 100
    data["forwards"] = [empty] * 101
    with pytest.raises(DumpError, match="2020000 nodes together"):
        from_recording_json(json.dumps(data))


def test_a_file_and_a_compressed_file_read_the_same(tmp_path, real):
    text = to_recording_json(real[0])
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_recordings(plain) == read_recordings(packed) == [real[0]]
    assert packed.stat().st_size < plain.stat().st_size


def test_a_directory_is_read_by_stage_and_rank(tmp_path, real):
    second = [replace(recording, stage=1) for recording in real]
    names = ["recording.d.json", "recording.c.json.gz", "recording.b.json", "recording.a.json"]
    for name, recording in zip(names, [*real, *second], strict=True):
        content = to_recording_json(recording).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    (tmp_path / "trace.stage0.rank0.json").write_text("something else")
    assert read_recordings(tmp_path) == [*real, *second]


def test_a_directory_without_recordings_says_what_was_looked_for(tmp_path):
    with pytest.raises(DumpError, match=r"holds no recording; looked for recording\.\*\.json"):
        read_recordings(tmp_path)


def test_recordings_of_several_runs_are_refused(tmp_path, real):
    for name in ("recording.a.json", "recording.b.json"):
        (tmp_path / name).write_text(to_recording_json(real[0]))
    with pytest.raises(DumpError, match="both of stage 0, rank 0"):
        read_recordings(tmp_path)
    (tmp_path / "recording.b.json").write_text(to_recording_json(Timeline(ranks=3).recordings()[1]))
    with pytest.raises(DumpError, match="of a group of 2 ranks"):
        read_recordings(tmp_path)


def test_an_unreadable_file_of_a_directory_is_named(tmp_path, real):
    (tmp_path / "recording.0.json").write_text(to_recording_json(real[0]))
    (tmp_path / "recording.1.json").write_text("{")
    with pytest.raises(DumpError, match=r"recording\.1\.json: At the file"):
        read_recordings(tmp_path)


def bomb(path, content=b"0"):
    """A gzip file of a few kilobytes that unpacks to more than may be read."""
    with gzip.open(path, "wb") as packed:
        for _ in range(MAX_DUMP_BYTES // (1 << 20) + 1):
            packed.write(content * (1 << 20))
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p.write_bytes(b"\x1f\x8b"), "damaged or cut short"),
        (lambda p: p.write_bytes(gzip.compress(b"x" * 1000)[:-6]), "damaged or cut short"),
        (
            lambda p: p.write_bytes(gzip.compress(bytes(range(256)) * 9)[:40] + b"zz" * 40),
            "damaged or cut",
        ),
        (bomb, "larger than 64 MiB"),
        (lambda p: p.open("wb").truncate(MAX_DUMP_BYTES + 1), "larger than 64 MiB"),
        (lambda p: p.write_bytes(b"{\xff}"), "byte 1 is not UTF-8"),
        (lambda p: p.mkdir(), "not a regular file"),
        (lambda p: None, "No such file"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, make, words):
    path = tmp_path / "recording.json"
    make(path)
    with pytest.raises(DumpError, match=words):
        read_dump(path)

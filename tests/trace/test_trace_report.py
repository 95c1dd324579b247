import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from kvpp_dag.errors import DumpError
from kvpp_dag.trace.overlap import ADVICE, Cause, analyze
from kvpp_dag.trace.records import Span
from kvpp_dag.trace.report import data as report_data
from kvpp_dag.trace.report import to_html
from kvpp_dag.trace.report.data import page_data
from tests.trace.report_data import make_recordings


class _Page(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.scripts, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, text):
        if self.inside:
            attrs, before = self.scripts[-1]
            self.scripts[-1] = attrs, before + text


def page(recordings):
    return to_html(recordings, analyze(recordings))


def data_of(recordings):
    return page_data(recordings, analyze(recordings))[0]


def changed(recording, number, **fields):
    """`recording` with fields of one forward replaced."""
    return replace(
        recording,
        forwards=tuple(replace(f, **fields) if f.number == number else f for f in recording.forwards),
    )


def test_scripts_run_by_digest_and_everything_else_is_forbidden():
    parsed = _Page(page(make_recordings(forwards=2)))
    (policy,) = [
        a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    run = [text for attrs, text in parsed.scripts if attrs.get("type") != "application/json"]
    assert allowed == [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run]
    assert len(run) == 2
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_no_tag_refers_to_anything_outside_the_page():
    parsed = _Page(page(make_recordings(forwards=2)))
    links = [
        a[name] for _, a in parsed.tags for name in ("src", "href", "xlink:href", "action") if name in a
    ]
    assert links == ["#timeline-title"]
    assert _Page("<img src='http://x/'>").tags == [("img", {"src": "http://x/"})]


def test_the_embedded_data_are_the_data_whatever_the_names_hold():
    names = ["</script><script>alert(1)</script>", "a & b \u2028 \u2029", "<!--", '"', "'", "]]>"]
    recordings = make_recordings(layers=len(names), names=names)
    text = page(recordings)
    ((_, embedded),) = [s for s in _Page(text).scripts if s[0].get("type") == "application/json"]
    assert json.loads(embedded) == json.loads(json.dumps(data_of(recordings)))
    assert json.loads(embedded)["names"] == [names]
    assert not set(embedded) & set("<>&\u2028\u2029")
    assert names[0] not in text


def test_what_forwards_share_is_stored_once():
    data = data_of(make_recordings(ranks=2, forwards=4))
    assert len(data["shapes"]) == 4  # with and without history, on two ranks
    assert len(data["forwards"]) == 4
    assert len(data["plans"]) == len(data["names"]) == 1
    runs = [forward["runs"][0] for forward in data["forwards"]]
    assert len({run["shape"] for run in runs}) == 2


def test_other_bytes_are_the_same_shape():
    first, second = make_recordings(forwards=3)
    graph = first.forwards[2].graph
    fewer = replace(graph, nodes=tuple(replace(node, bytes=node.bytes // 2) for node in graph.nodes))
    data = data_of([changed(first, 2, graph=fewer), second])
    before, after = (data["forwards"][number]["runs"][0] for number in (1, 2))
    assert before["shape"] == after["shape"]
    sent = [data["bytes"][run["bytes"]] for run in (before, after)]
    assert [n // 2 for n in sent[0]] == list(sent[1])
    assert any(sent[1])


def test_times_are_after_the_ranks_own_begin_and_waits_are_what_was_recorded():
    recordings = make_recordings()
    data = data_of(recordings)
    began = [recording.forwards[2].began for recording in recordings]
    for run, recording in zip(data["forwards"][2]["runs"], recordings, strict=True):
        record = recording.forwards[2]
        assert run["offset"] == record.began - min(began)
        nodes = [node[0] for node in data["shapes"][run["shape"]]]
        spans = {
            node: Span(record.began + start, record.began + start + length)
            for node, start, length in zip(nodes, run["starts"], run["lengths"], strict=True)
        }
        assert spans == record.spans
        waits = {nodes[i]: Span(record.began + s, record.began + s + n) for i, s, n in run["waits"]}
        assert waits == record.waits
        assert len(waits) > 5
    assert {run["offset"] > 0 for run in data["forwards"][2]["runs"]} == {True, False}


def gate_of(recording, number, transfer):
    data = data_of([recording])
    (run,) = next(f for f in data["forwards"] if f["number"] == number)["runs"]
    nodes = [node[0] for node in data["shapes"][run["shape"]]]
    gate = {nodes[node]: gate for node, _, gate in run["transfers"]}[transfer]
    return gate if gate is None or gate < 0 else nodes[gate]


def test_a_transfer_names_the_last_of_what_it_waited_for():
    recording = make_recordings()[0]
    record = recording.forwards[2]
    late = record.spans["broadcast[2]"].end
    spans = dict(record.spans)
    assert gate_of(recording, 2, "broadcast[3]") == "broadcast[2]"
    spans["completion[2]"] = Span(late + 5, late + 5)
    assert gate_of(changed(recording, 2, spans=spans), 2, "broadcast[3]") == "completion[2]"
    submitted = dict(record.submitted) | {"broadcast[3]": late + 10}
    assert gate_of(changed(recording, 2, submitted=submitted), 2, "broadcast[3]") == -1
    for name in ("ready[3]", "broadcast[2]", "completion[2]"):
        del spans[name]
    alone = dict(record.submitted)
    del alone["broadcast[3]"]
    assert gate_of(changed(recording, 2, spans=spans, submitted=alone), 2, "broadcast[3]") is None


def test_layers_carry_the_causes_of_the_analysis():
    recordings = make_recordings()
    analyses = analyze(recordings)
    data = page_data(recordings, analyses)[0]
    assert data["causes"] == [[str(cause), ADVICE[cause]] for cause in Cause]
    layers = data["forwards"][2]["runs"][1]["layers"]
    parts = [
        [(data["causes"][cause][0], ns, data["texts"][text]) for cause, ns, text, _ in layer[5]]
        for layer in layers
    ]
    expected = analyses[1][2].layers
    assert parts == [[(str(p.cause), p.ns, p.detail) for p in layer.parts] for layer in expected]
    assert sum(len(p) for p in parts) > 10


def test_a_page_that_would_be_too_large_keeps_the_last_forwards_and_says_so(monkeypatch):
    recordings = make_recordings(forwards=5)
    largest = sum(len(r.forwards[4].graph.nodes) + len(r.forwards[4].waits) for r in recordings)
    assert data_of(recordings)["notes"] == []
    monkeypatch.setattr(report_data, "MAX_SPANS", int(2.5 * largest))
    data = data_of(recordings)
    assert [forward["number"] for forward in data["forwards"]] == [3, 4]
    assert len(data["notes"]) == 1
    assert "the last 2 of 5 forwards" in data["notes"][0]
    monkeypatch.setattr(report_data, "MAX_SPANS", largest - 1)
    with pytest.raises(DumpError, match=r"Forward 4 holds .* nodes and waits"):
        data_of(recordings)


def test_graphs_that_are_too_many_to_draw_are_left_out_and_said(monkeypatch):
    recordings = make_recordings()
    monkeypatch.setattr(report_data, "MAX_DRAWN", 250)
    data, drawn = page_data(recordings, analyze(recordings))
    assert 0 < len(drawn) < len(data["shapes"])
    assert data["notes"][0].startswith(
        f"Of {len(data['shapes'])} different graphs {len(drawn)} are drawn"
    )
    assert page(recordings).count("<template id=") == len(drawn)


def test_a_forward_that_failed_lacks_what_never_ran():
    recording = make_recordings()[0]
    record = recording.forwards[2]
    spans = {name: span for name, span in record.spans.items() if name != "compute[11]"}
    data = data_of([changed(recording, 2, spans=spans, ended=0, error="ValueError: <b>")])
    (run,) = data["forwards"][2]["runs"]
    place = [node[0] for node in data["shapes"][run["shape"]]].index("compute[11]")
    assert run["starts"][place] is run["lengths"][place] is None
    assert run["starts"].count(None) == 1
    assert run["ended"] is None
    assert run["error"] == "ValueError: <b>"


def test_a_forward_that_is_held_twice_is_refused():
    recording = make_recordings()[0]
    twice = replace(recording, forwards=(*recording.forwards, recording.forwards[1]))
    with pytest.raises(DumpError, match="rank 0 holds forward 1 twice"):
        data_of([twice])


def test_a_recording_without_a_plan_has_layers_without_names():
    data = data_of([replace(make_recordings(layers=3)[0], plan=None)])
    assert data["names"] == [("layer_0", "layer_1", "layer_2")]
    assert data["recordings"][0]["plan"] is None
    assert data["plans"] == []


def test_the_plan_says_who_owns_what():
    (plan,) = data_of(make_recordings(layers=3))["plans"]
    assert [rank["layers"] for rank in plan["ranks"]] == [[0, 1], [2]]
    assert [rank["owned"] for rank in plan["ranks"]] == [18_432 * 9 // 4, 18_432]
    assert all(rank["all"] == rank["owned"] + rank["scratch"] for rank in plan["ranks"])
    assert [layer["owner"] for layer in plan["layers"]] == [0, 0, 1]
    assert plan["layers"][0]["components"] == "main 18,432, indexer 4,608"


def test_a_plan_of_very_many_ranks_is_listed_in_part(monkeypatch):
    monkeypatch.setattr(report_data, "MAX_RANKS", 1)
    data = data_of(make_recordings(layers=3))
    assert len(data["plans"][0]["ranks"]) == 1
    assert data["notes"] == ["The page lists 1 of a plan's 2 ranks."]

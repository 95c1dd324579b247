"""Chrome traces: slices that nest, arrows that bind, and names, of real and of made-up forwards."""

import json
from collections import defaultdict
from functools import partial

import pytest
from hypothesis import given

from kvpp_dag.graph import Kind, Policy, build_forward
from kvpp_dag.graph.names import range_name, wait_name
from kvpp_dag.trace import ForwardRecord, Span, to_chrome
from kvpp_dag.trace.mindstudio import to_mindstudio
from tests.builders import compute
from tests.runtime_support import run_group, small_plan
from tests.runtime_work import record
from tests.trace.recordings import odd_recordings, recording_of

BLOCKS = (0, 1, 0, 1, 2)
LAYERS = 5
PLAN = small_plan(LAYERS, 2)


@pytest.fixture(scope="module", params=list(Policy))
def ranks(request):
    """The recordings of two ranks that were processes."""
    work = partial(record, layers=LAYERS, blocks=BLOCKS, policy=request.param)
    records = run_group("gloo", 2, work)
    assert all(isinstance(r, list) for r in records), records
    return [recording_of(r, PLAN, rank) for rank, r in enumerate(records)]


def events_of(trace, *phases):
    return [event for event in json.loads(trace)["traceEvents"] if event["ph"] in phases]


def ns(microseconds):
    return round(microseconds * 1000)


def tracks_of(trace):
    """The slices of each track as (start, end, name) in nanoseconds, outer ones first."""
    tracks = defaultdict(list)
    for e in events_of(trace, "X"):
        start = ns(e["ts"])
        tracks[e["pid"], e["tid"]].append((start, start + ns(e["dur"]), e["name"]))
    return {track: sorted(slices, key=lambda s: (s[0], -s[1])) for track, slices in tracks.items()}


def crossing(slices):
    """Pairs of slices of one track that overlap without one lying inside the other."""
    found, open_ = [], []
    for slice_ in slices:
        while open_ and open_[-1][1] <= slice_[0]:
            open_.pop()
        if open_ and open_[-1][1] < slice_[1]:
            found.append((open_[-1][2], slice_[2]))
        open_.append(slice_)
    return found


def test_crossing_is_noticed():
    """The control of what follows."""
    assert crossing([(0, 10, "a"), (2, 8, "b"), (8, 10, "c"), (10, 12, "d")]) == []
    assert crossing([(0, 10, "a"), (5, 11, "b")]) == [("a", "b")]


def test_slices_of_a_track_nest(ranks):
    tracks = tracks_of(to_chrome(ranks))
    assert sorted(tracks) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [pair for slices in tracks.values() for pair in crossing(slices)] == []


@given(odd_recordings(largest=2**41))  # beyond 2**53 the format's own numbers are inexact
def test_slices_nest_whatever_the_times(recording):
    tracks = tracks_of(to_chrome([recording]))
    assert [pair for slices in tracks.values() for pair in crossing(slices)] == []


def test_there_is_one_slice_per_node_and_one_per_wait(ranks):
    for recording in ranks:
        slices = events_of(to_chrome([recording]), "X")
        names = sorted(e["name"] for e in slices)
        nodes = [range_name(node) for r in recording.forwards for node in r.spans]
        waits = [wait_name(event) for r in recording.forwards for event in r.waits]
        assert names == sorted(nodes + waits)
        assert len(waits) == LAYERS * sum(block > 0 for block in BLOCKS)
        assert {e["cat"] for e in slices if e["name"].startswith("kvpp.wait.")} == {"wait"}


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("broadcast[12]", "kvpp.broadcast.layer_12"),
        ("ready[0]", "kvpp.ready.layer_0"),
        ("prologue", "kvpp.prologue"),
    ],
)
def test_names_of_nodes(node, name):
    assert range_name(node) == name


def test_names_of_waits():
    assert wait_name("completion[3]") == "kvpp.wait.layer_3"
    assert wait_name("done") == "kvpp.wait.done"


def test_arrows_lead_over_the_four_nodes_of_a_layer(ranks):
    arrows = defaultdict(list)
    for event in events_of(to_chrome(ranks), "s", "t", "f"):
        arrows[event["id"], event["cat"], event["name"]].append(event)
    with_history = sum(block > 0 for block in BLOCKS)
    assert len(arrows) == len(ranks) * with_history * LAYERS
    for chain in arrows.values():
        assert [event["ph"] for event in chain] == ["s", "t", "t", "f"]
        assert [event.get("bp") for event in chain] == [None, None, None, "e"]
        times = [event["ts"] for event in chain]
        assert times == sorted(times)
        assert [event["tid"] for event in chain] == [1, 2, 2, 1]


def test_every_arrow_binds_to_the_slice_of_its_node(ranks):
    trace = to_chrome(ranks)
    tracks = tracks_of(trace)
    for event in events_of(trace, "s", "t", "f"):
        labels = {"s": ("ready",), "t": ("broadcast", "completion"), "f": ("attend",)}[event["ph"]]
        layer = event["id"].split(".")[2]
        at = ns(event["ts"])
        around = [name for start, end, name in tracks[event["pid"], event["tid"]] if start <= at <= end]
        assert {f"kvpp.{label}.layer_{layer}" for label in labels} & set(around), event


def test_processes_and_threads_are_named_and_sorted(ranks):
    meta = events_of(to_chrome(ranks), "M")
    for rank in (0, 1):
        of_rank = [(e["name"], e.get("tid"), e["args"]) for e in meta if e["pid"] == rank]
        assert ("process_name", None, {"name": f"stage 0 rank {rank}"}) in of_rank
        assert ("process_sort_index", None, {"sort_index": rank}) in of_rank
        for tid, stream in ((1, "compute"), (2, "transfer")):
            assert ("thread_name", tid, {"name": f"{stream} stream"}) in of_rank
            assert ("thread_sort_index", tid, {"sort_index": tid}) in of_rank
        assert len(of_rank) == 6


def test_stages_are_processes_of_their_own(ranks):
    later = [recording_of(r.forwards, PLAN, r.rank, stage=1) for r in ranks]
    slices = events_of(to_chrome([*ranks, *later]), "X")
    assert {e["pid"] for e in slices} == {0, 1, 2, 3}


def test_a_stream_of_another_name_has_a_track(ranks):
    graph = build_forward(PLAN, rank=0, num_blocks=2, history=False, policy=Policy.ON_ACQUIRE)
    graph = type(graph)(nodes=(*graph.nodes, compute("copy", stream="side")), ranks=2)
    trace = to_chrome([recording_of([forward_of(graph, {"copy": Span(1, 2)})], PLAN)])
    assert [e["tid"] for e in events_of(trace, "X")] == [3]
    assert "side stream" in [e["args"].get("name") for e in events_of(trace, "M")]


def test_a_broadcast_says_what_it_carries(ranks):
    seen = 0
    for recording in ranks:
        graph = recording.forwards[1].graph
        for event in events_of(to_chrome([recording]), "X"):
            args = event["args"]
            if event["cat"] != "broadcast":
                assert "bytes" not in args
                continue
            node = graph[args["node"]]
            assert (args["owner"], args["slot"], args["bytes"]) == (node.owner, node.slot, node.bytes)
            assert args["layer"] == node.layer
            assert args["layer_name"] == PLAN.bundles[node.layer].layer
            assert args["forward"] in (2, 4, 5)
            assert args["submitted_us"] <= event["ts"]
            seen += 1
    assert seen == 2 * 3 * LAYERS


def counter(recording, name):
    events = [e for e in events_of(to_chrome([recording]), "C") if e["name"] == name]
    return [(round(e["ts"] * 1000), next(iter(e["args"].values()))) for e in events]


def test_counters_of_real_forwards(ranks):
    for recording in ranks:
        largest = max(node.bytes for node in recording.forwards[1].graph.broadcasts)
        in_flight = counter(recording, "bytes in flight")
        assert max(value for _, value in in_flight) == largest  # one broadcast at a time
        busy = counter(recording, "slots busy")
        assert {value for _, value in busy} <= {0, 1, 2}
        assert max(value for _, value in busy) >= 1
        for steps in (in_flight, busy):
            assert steps[-1][1] == 0
            assert [time for time, _ in steps] == sorted({time for time, _ in steps})


def test_counters_of_a_made_up_forward():
    """Rank 1 of 2 owns layer 2, and receives layers 0 and 1 into the slots 0 and 1."""
    forward = made_up(
        Policy.ON_ACQUIRE,
        broadcast_0=(1, 2),
        broadcast_1=(2.5, 4),
        broadcast_2=(4, 6),
        attend_0=(3, 5),
        attend_1=(7, 9),
        attend_2=(9, 10),
    )
    sizes = [node.bytes for node in forward.graph.broadcasts]
    assert len(set(sizes)) > 1
    recording = recording_of([forward], small_plan(3, 2), 1)
    assert counter(recording, "bytes in flight") == [
        (1000, sizes[0]),
        (2000, 0),
        (2500, sizes[1]),
        (4000, sizes[2]),
        (6000, 0),
    ]
    assert counter(recording, "slots busy") == [(1000, 1), (2500, 2), (5000, 1), (9000, 0)]


def test_a_layer_that_nothing_read_holds_its_slot_to_the_end():
    forward = made_up(Policy.ON_ACQUIRE, broadcast_0=(1, 2))
    assert counter(recording_of([forward], small_plan(3, 2), 1), "slots busy") == [(1000, 1), (10**6, 0)]


def test_the_mindstudio_form_is_the_bare_array_of_the_same_events(ranks):
    assert json.loads(to_mindstudio(ranks)) == json.loads(to_chrome(ranks))["traceEvents"]
    assert json.loads(to_mindstudio(ranks[:1])) != json.loads(to_chrome(ranks))["traceEvents"]


def forward_of(graph, spans, waits=(), ended=10**6):
    return ForwardRecord(
        number=7,
        graph=graph,
        began=0,
        ended=ended,
        error=None,
        needed_blocks=None,
        submitted={},
        spans=spans,
        waits=dict(waits),
    )


def made_up(policy, ended=10**6, **times):
    """A forward of rank 1 of 2 with three layers; `attend_0=(5, 9)` ran from 5 to 9 us."""
    graph = build_forward(small_plan(3, 2), rank=1, num_blocks=2, history=True, policy=policy)
    spans, waits = {}, {}
    for name, (start, end) in times.items():
        label, _, layer = name.removeprefix("wait_").partition("_")
        node = f"{label}[{layer}]" if layer else label
        span = Span(round(start * 1000), round(end * 1000))
        (waits if name.startswith("wait_") else spans)[node] = span
    return forward_of(graph, spans, waits, ended)


def trace_of(forward):
    return to_chrome([recording_of([forward], small_plan(3, 2), 1)])


def slices_of(forward):
    """Start and duration of each slice, by node id, or by the name of a wait."""
    slices = events_of(trace_of(forward), "X")
    return {
        e["name"] if e["cat"] == "wait" else e["args"]["node"]: (e["ts"], round(e["dur"], 3))
        for e in slices
    }


def test_an_event_is_half_a_microsecond_where_there_is_room():
    forward = made_up(Policy.ON_ACQUIRE, prologue=(0, 10), ready_0=(1, 1), broadcast_0=(2, 4))
    assert slices_of(forward) == {"prologue": (0, 10), "ready[0]": (1, 0.5), "broadcast[0]": (2, 2)}


def test_an_event_ends_where_the_next_slice_starts():
    forward = made_up(Policy.ON_ACQUIRE, ready_1=(1, 1), wait_completion_0=(1.2, 3))
    assert slices_of(forward) == {"ready[1]": (1, 0.2), "kvpp.wait.layer_0": (1.2, 1.8)}


def test_an_event_ends_with_the_slice_that_it_lies_in():
    """With `on_release` an event is recorded inside the compute of its layer."""
    forward = made_up(Policy.ON_RELEASE, compute_0=(0, 2), ready_2=(1.9, 1.9), attend_1=(5, 6))
    assert slices_of(forward)["ready[2]"] == (1.9, 0.1)
    assert all(crossing(slices) == [] for slices in tracks_of(trace_of(forward)).values())


def test_the_last_event_of_a_forward_ends_with_it():
    forward = made_up(Policy.ON_ACQUIRE, 2600, broadcast_2=(1, 2), completion_2=(2.5, 2.5))
    assert slices_of(forward)["completion[2]"] == (2.5, 0.1)


def test_a_layer_that_did_not_get_through_has_no_arrow():
    whole = {"ready_0": (0, 0), "broadcast_0": (1, 2), "completion_0": (2, 2), "attend_0": (3, 4)}
    assert len(events_of(trace_of(made_up(Policy.ON_ACQUIRE, **whole)), "s", "t", "f")) == 4
    del whole["attend_0"]
    assert events_of(trace_of(made_up(Policy.ON_ACQUIRE, **whole)), "s", "t", "f") == []


def test_a_slice_that_would_end_inside_the_next_ends_where_that_starts():
    forward = made_up(Policy.ON_ACQUIRE, wait_completion_0=(1, 3.001), attend_0=(3, 5))
    assert slices_of(forward) == {"kvpp.wait.layer_0": (1, 2), "attend[0]": (3, 2)}


def test_events_that_are_out_of_order_have_no_arrow():
    times = {"ready_0": (0, 0), "broadcast_0": (3, 4), "completion_0": (2, 2), "attend_0": (3, 4)}
    assert events_of(trace_of(made_up(Policy.ON_ACQUIRE, **times)), "s", "t", "f") == []


def test_no_forwards_and_no_rank_at_all():
    assert json.loads(to_chrome([]))["traceEvents"] == []
    quiet = to_chrome([recording_of([], PLAN)])
    assert events_of(quiet, "X", "C", "s", "t", "f") == []
    assert len(events_of(quiet, "M")) == 6


def test_compute_is_recorded_as_compute(ranks):
    """Nothing on the compute track but compute, its events and waits."""
    slices = [e for e in events_of(to_chrome(ranks), "X") if e["tid"] == 1]
    assert {e["cat"] for e in slices} == {str(Kind.COMPUTE), str(Kind.READY), "wait"}

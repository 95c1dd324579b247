"""Chrome traces: slices that nest, arrows that bind, and names, of real and of made-up forwards."""

import json
from collections import defaultdict
from functools import partial

import pytest

from kvpp_dag.graph import Policy, build_forward
from kvpp_dag.trace import ForwardRecord, Span, merge_chrome, to_chrome
from tests.runtime_support import run_group, small_plan
from tests.runtime_work import record

BLOCKS = (0, 1, 0, 1, 2)
LAYERS = 5


@pytest.fixture(scope="module", params=list(Policy))
def ranks(request):
    """The records of two ranks that were processes."""
    work = partial(record, layers=LAYERS, blocks=BLOCKS, policy=request.param)
    records = run_group("gloo", 2, work)
    assert all(isinstance(r, list) for r in records), records
    return records


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


def test_there_is_one_slice_per_node_and_one_per_wait(ranks):
    for records in ranks:
        names = sorted(e["name"] for e in events_of(to_chrome([records]), "X"))
        nodes = [span.node for r in records for span in r.ran]
        waits = [f"wait for {span.node}" for r in records for span in r.waited]
        assert names == sorted(nodes + waits)
        assert len(waits) == LAYERS * sum(block > 0 for block in BLOCKS)


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
        label = {"s": ("ready",), "t": ("broadcast", "completion"), "f": ("attend",)}[event["ph"]]
        layer = event["id"].split(".")[2]
        at = ns(event["ts"])
        around = [name for start, end, name in tracks[event["pid"], event["tid"]] if start <= at <= end]
        assert {f"{one}[{layer}]" for one in label} & set(around), event


def test_processes_and_threads_are_named_and_sorted(ranks):
    meta = events_of(to_chrome(ranks), "M")
    for rank in (0, 1):
        of_rank = [(e["name"], e.get("tid"), e["args"]) for e in meta if e["pid"] == rank]
        assert ("process_name", None, {"name": f"rank {rank}"}) in of_rank
        assert ("process_sort_index", None, {"sort_index": rank}) in of_rank
        for tid, stream in ((1, "compute"), (2, "transfer")):
            assert ("thread_name", tid, {"name": f"{stream} stream"}) in of_rank
            assert ("thread_sort_index", tid, {"sort_index": tid}) in of_rank
        assert len(of_rank) == 6


def test_a_broadcast_says_what_it_carries(ranks):
    for records in ranks:
        graph = records[1].graph
        for event in events_of(to_chrome([records]), "X"):
            if event["cat"] != "broadcast":
                continue
            node, args = graph[event["name"]], event["args"]
            assert (args["owner"], args["slot"], args["bytes"]) == (node.owner, node.slot, node.bytes)
            assert (args["layer"], args["forward"]) == (node.layer, args["forward"])
            assert args["submitted_us"] <= event["ts"]


def test_traces_of_ranks_merge_into_the_trace_of_all(ranks):
    one_by_one = [to_chrome([records]) for records in ranks]
    assert json.loads(merge_chrome(one_by_one)) == json.loads(to_chrome(ranks))
    assert json.loads(merge_chrome(one_by_one[:1])) != json.loads(to_chrome(ranks))
    assert json.loads(merge_chrome([]))["traceEvents"] == []


def made_up(policy, **times):
    """A forward of rank 1 of 2 with three layers; `attend_0=(5, 9)` ran from 5 to 9 us."""
    graph = build_forward(small_plan(3, 2), rank=1, num_blocks=2, history=True, policy=policy)
    forward = ForwardRecord(number=7, graph=graph, began=0, ended=10**6)
    for name, (start, end) in times.items():
        label, _, layer = name.removeprefix("wait_").partition("_")
        node = f"{label}[{layer}]" if layer else label
        span = Span(node=node, start=round(start * 1000), end=round(end * 1000))
        (forward.waited if name.startswith("wait_") else forward.ran).append(span)
    return forward


def slices_of(forward):
    return {e["name"]: (e["ts"], round(e["dur"], 3)) for e in events_of(to_chrome([[forward]]), "X")}


def test_an_event_is_half_a_microsecond_where_there_is_room():
    forward = made_up(Policy.ON_ACQUIRE, prologue=(0, 10), ready_0=(1, 1), broadcast_0=(2, 4))
    assert slices_of(forward) == {"prologue": (0, 10), "ready[0]": (1, 0.5), "broadcast[0]": (2, 2)}


def test_an_event_ends_where_the_next_slice_starts():
    forward = made_up(Policy.ON_ACQUIRE, ready_1=(1, 1), wait_completion_0=(1.2, 3))
    assert slices_of(forward) == {"ready[1]": (1, 0.2), "wait for completion[0]": (1.2, 1.8)}


def test_an_event_ends_with_the_slice_that_it_lies_in():
    """With `on_release` an event is recorded inside the compute of its layer."""
    forward = made_up(Policy.ON_RELEASE, compute_0=(0, 2), ready_2=(1.9, 1.9), attend_1=(5, 6))
    assert slices_of(forward)["ready[2]"] == (1.9, 0.1)
    assert all(crossing(slices) == [] for slices in tracks_of(to_chrome([[forward]])).values())


def test_the_last_event_of_a_forward_ends_with_it():
    forward = made_up(Policy.ON_ACQUIRE, broadcast_2=(1, 2), completion_2=(2.5, 2.5))
    forward.ended = 2600
    assert slices_of(forward)["completion[2]"] == (2.5, 0.1)


def test_a_layer_that_did_not_get_through_has_no_arrow():
    whole = {"ready_0": (0, 0), "broadcast_0": (1, 2), "completion_0": (2, 2), "attend_0": (3, 4)}
    assert len(events_of(to_chrome([[made_up(Policy.ON_ACQUIRE, **whole)]]), "s", "t", "f")) == 4
    del whole["attend_0"]
    assert events_of(to_chrome([[made_up(Policy.ON_ACQUIRE, **whole)]]), "s", "t", "f") == []


def test_a_rank_without_forwards_and_no_rank_at_all():
    assert json.loads(to_chrome([])) == json.loads(to_chrome([[], []]))

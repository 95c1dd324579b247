"""The figures of a forward and its layers, which ranks are compared, and causes on real streams."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given

from kvpp_dag.graph import Policy
from kvpp_dag.runtime import Transport
from kvpp_dag.trace import ForwardRecord, Recorder, Recording, Span, summarize
from kvpp_dag.trace.overlap import Cause, ForwardOverlap, analyze
from tests.runtime_support import NUM_BLOCKS, make_engine, run_group, small_plan
from tests.trace.timelines import Timeline, timelines


def test_figures_of_a_forward_by_hand():
    """Prologue 3 and three layers of 8 beside three transfers of 10, of which compute waits for 7, 2 and 2."""
    ((forward,), _) = analyze(Timeline(layers=3, transfer=10).recordings(number=7))
    assert (forward.rank, forward.number) == (0, 7)
    assert (forward.duration_ns, forward.transfer_ns, forward.exposed_ns) == (38, 30, 11)
    assert forward.hidden_share == pytest.approx(19 / 30)
    assert forward.overlap_percent == pytest.approx(100 * (3 + 8 + 8) / 30)
    assert (forward.free_transfers_ns, forward.free_compute_ns) == (27, 30)
    assert [(s.node, s.end - s.start) for s in forward.critical_path][-2:] == [
        ("attend[2]", 2),
        ("compute[2]", 6),
    ]


def test_figures_of_layers():
    """Layer 0 has two components of 8 and 2 bytes a block, layer 1 one of 8; of 4 blocks 3 are needed."""
    ((forward,), _) = analyze(Timeline(layers=3, transfer=10).recordings(needed_blocks=3))
    first, second, third = forward.layers
    assert [layer.name for layer in forward.layers] == ["layers.0", "layers.1", "layers.2"]
    assert [layer.owner for layer in forward.layers] == [0, 0, 1]
    assert [layer.slot for layer in forward.layers] == [0, 1, 0]
    assert (first.bytes, first.needed_bytes) == (40, 30)
    assert (second.bytes, second.needed_bytes) == (32, 24)
    assert (forward.bytes, forward.needed_bytes) == (104, 78)
    assert (third.transfer_ns, third.exposed_ns) == (10, 2)
    assert third.hidden_share == pytest.approx(0.8)


def test_what_is_not_known_is_none():
    mine, _ = Timeline(layers=3).recordings()
    ((forward,),) = analyze([mine])
    assert forward.needed_bytes is None
    ((nameless,),) = analyze([replace(mine, plan=None)])
    assert [layer.name for layer in nameless.layers] == ["layer_0", "layer_1", "layer_2"]
    assert replace(nameless, layers=forward.layers) == forward


def test_a_forward_without_transfers():
    (recording, _) = Timeline(layers=3).recordings()
    (record,) = recording.forwards
    quiet = [n for n in record.graph.nodes if n.kind == "compute"]
    graph = replace(record.graph, nodes=tuple(replace(n, after=()) for n in quiet), history=False)
    spans = {node.id: record.spans[node.id] for node in quiet}
    alone = replace(record, graph=graph, spans=spans, waits={}, submitted={})
    ((forward,),) = analyze([replace(recording, forwards=(alone,))])
    assert (forward.layers, forward.transfer_ns, forward.exposed_ns) == ((), 0, 0)
    assert (forward.hidden_share, forward.overlap_percent) == (1.0, 0.0)
    assert (forward.bytes, forward.needed_bytes) == (0, 0)


LATE_PEER = Timeline(transfers={0: 2}, computes={(1, 2): 26})


def blamed(recordings: list[Recording]) -> bool:
    return any(
        part.cause is Cause.PEER
        for forwards in analyze(recordings)
        for forward in forwards
        for layer in forward.layers
        for part in layer.parts
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"clock": "another host"}, False), ({"stage": 1}, False)],
)
def test_ranks_are_compared_on_one_clock_and_stage(change, expected):
    mine, peer = LATE_PEER.recordings()
    assert blamed([mine, replace(peer, **change)]) == expected


def test_forwards_are_matched_by_number():
    """Each rank kept three forwards, and only the second of them is slow on rank 1."""
    healthy = [
        Timeline(transfers={0: 2}, began=at).recordings(number=n) for n, at in ((1, 0), (3, 9000))
    ]
    late = replace(LATE_PEER, began=5000).recordings(number=2)
    mine, peer = (
        replace(late[r], forwards=(*healthy[0][r].forwards, *late[r].forwards, *healthy[1][r].forwards))
        for r in (0, 1)
    )
    first, _ = analyze([mine, peer])
    assert [forward.number for forward in first] == [1, 2, 3]
    assert [sum(layer.exposed_ns for layer in forward.layers) for forward in first] == [0, 17, 0]
    lost = replace(peer, forwards=peer.forwards[::2])
    assert blamed([mine, peer])
    assert not blamed([mine, lost])


def test_recordings_come_back_in_the_order_given():
    mine, peer = LATE_PEER.recordings()
    assert [forwards[0].rank for forwards in analyze([peer, mine])] == [1, 0]
    assert analyze([]) == ()


def test_several_waits_of_one_layer_are_one():
    (recording, _) = Timeline(layers=1, transfer=30).recordings()
    (record,) = recording.forwards
    twice = replace(record.graph.nodes[2], id="completion_too[0]", after=("broadcast[0]",))
    graph = replace(record.graph, nodes=(*record.graph.nodes[:3], twice, *record.graph.nodes[3:]))
    waits = {"completion[0]": Span(1003, 1010), "completion_too[0]": Span(1012, 1030)}
    again = replace(record, graph=graph, waits=waits)
    ((forward,),) = analyze([replace(recording, forwards=(again,))])
    assert forward.exposed_ns == 7 + 18
    assert sum(part.ns for part in forward.layers[0].parts) == 7 + 18


@given(timeline=timelines())
def test_sums_and_shares(timeline):
    for recording, (forward,) in zip(timeline.recordings(), analyze(timeline.recordings()), strict=True):
        layers = forward.layers
        assert forward.exposed_ns == sum(layer.exposed_ns for layer in layers)
        assert forward.transfer_ns == sum(layer.transfer_ns for layer in layers)
        assert 0 <= forward.hidden_share <= 1
        assert all(0 <= layer.hidden_share <= 1 for layer in layers)
        assert 0 <= forward.overlap_percent <= 100
        assert forward.free_transfers_ns == forward.duration_ns - forward.exposed_ns
        summary = summarize(recording.forwards)
        assert forward.overlap_percent == summary.overlap_percent
        assert forward.bytes == summary.bytes


# On real streams: ranks are threads, the transfer stream is a worker thread, and a transfer sleeps as if a DMA engine
# moved the bytes. Delays are several times what a busy machine adds.

MS = 0.001


class SlowTransport:
    """`inner`, with transfers that take `usual` ms, or what `took` says of a layer."""

    def __init__(self, inner: Transport, usual: float, took: dict[int, float]) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.usual = usual
        self.took = took
        self.layers = 0

    def agree(self, token: bytes) -> None:
        self.inner.agree(token)

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        send = self.inner.prepare(view, owner)
        took = self.took.get(self.layers, self.usual)
        self.layers += 1

        def slowly() -> None:
            send()
            time.sleep(took * MS)

        return slowly


def delayed(
    transport: Transport,
    *,
    layers: int = 6,
    depth: int = 1,
    policy: Policy = Policy.ON_ACQUIRE,
    usual: float = 3,
    took: dict[int, float] | None = None,
    attend: float = 10,
    compute: float = 10,
    sleeps: dict[str, float] | None = None,
    late: dict[str, float] | None = None,
) -> Recording:
    """One forward with these times in ms; `sleeps` are of any rank, `late` of rank 1 in addition."""
    plan = small_plan(layers, transport.size, depth)
    recorder = Recorder()
    forward = make_engine(
        plan, SlowTransport(transport, usual, took or {}), policy=policy, observer=recorder
    ).forward
    extra = (late or {}) if transport.rank == 1 else {}

    def run(node: str, usually: float) -> None:
        time.sleep(((sleeps or {}).get(node, usually) + extra.get(node, 0)) * MS)

    transport.agree(b"every rank is ready")
    run("begin", 0)
    forward.begin(history=True)
    run("prologue", 5)
    for layer in range(layers):
        forward.acquire(layer)
        run(f"attend[{layer}]", attend)
        forward.release(layer)
        run(f"compute[{layer}]", compute)
    forward.end()
    return Recording(
        rank=transport.rank,
        ranks=transport.size,
        stage=0,
        clock="this host",
        num_blocks=NUM_BLOCKS,
        plan=plan,
        forwards=tuple(recorder.forwards),
    )


def dominant(forward: ForwardOverlap, *, first: int = 0) -> Cause:
    """What cost most from layer `first` on; the wait of layer 0 is there in any forward."""
    totals: dict[Cause, int] = {}
    for layer in forward.layers[first:]:
        for part in layer.parts:
            totals[part.cause] = totals.get(part.cause, 0) + part.ns
    return max(totals, key=totals.__getitem__)


INJECTED = {
    "slow link": ({"usual": 40, "attend": 2, "compute": 3}, Cause.LINK, 1, "broadcast"),
    "late hook": ({"took": {4: 90}, "sleeps": {"compute[2]": 130}}, Cause.HOOK, 4, "broadcast[4]"),
    "slow slot": (
        {"policy": Policy.ON_RELEASE, "took": {4: 90}, "sleeps": {"attend[2]": 130}, "compute": 3},
        Cause.SLOT,
        4,
        "attend[2]",
    ),
    "slow previous transfer": (
        {
            "policy": Policy.ON_RELEASE,
            "depth": 3,
            "layers": 8,
            "usual": 8,
            "took": {5: 90, 6: 110},
            "attend": 8,
            "compute": 22,
        },
        Cause.PREVIOUS,
        6,
        "broadcast[5]",
    ),
    "slow first transfer": ({"took": {0: 80}}, Cause.FIRST, 0, "broadcast[0]"),
}


@pytest.mark.parametrize(("times", "cause", "layer", "node"), INJECTED.values(), ids=INJECTED)
def test_an_injected_delay_is_the_dominant_cause(times, cause, layer, node):
    for (forward,) in analyze(run_group("local", 2, partial(delayed, **times))):
        assert dominant(forward, first=min(layer, 1)) is cause
        most = forward.layers[layer].parts[0]
        assert most.cause is cause
        assert most.node.startswith(node)


@pytest.mark.parametrize(("where", "layer"), [("compute[2]", 4), ("begin", 0)])
def test_an_injected_late_peer_is_the_dominant_cause_on_the_other_rank(where, layer):
    (mine,), (late,) = analyze(run_group("local", 2, partial(delayed, late={where: 100})))
    assert dominant(mine) is Cause.PEER
    assert "rank 1" in mine.layers[layer].parts[0].detail
    assert late.exposed_ns < mine.exposed_ns
    assert not late.exposed_ns or dominant(late) is not Cause.PEER


def test_bounds_and_path_of_real_forwards():
    recordings = run_group("local", 2, partial(delayed, usual=15))
    for recording, (forward,) in zip(recordings, analyze(recordings), strict=True):
        (record,) = recording.forwards
        assert isinstance(record, ForwardRecord)
        assert 0 < forward.free_compute_ns <= forward.duration_ns
        assert 0 < forward.free_transfers_ns <= forward.duration_ns
        steps = forward.critical_path
        assert (steps[0].start, steps[-1].end) == (record.began, record.ended)
        assert sum(step.end - step.start for step in steps) == forward.duration_ns

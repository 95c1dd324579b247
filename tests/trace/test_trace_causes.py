"""Causes of exposed waits: on timelines whose answer follows by hand, each alone, mixed, and with controls."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpp_dag.graph import Policy
from kvpp_dag.trace import Span
from kvpp_dag.trace.overlap import ADVICE, Cause, analyze
from tests.trace.timelines import Timeline, timelines

ON_RELEASE = Policy.ON_RELEASE
SLOW_FIRST = {0: 2}
"""Transfers in which the first one is hidden by the prologue of 3."""


def causes(timeline, rank=0):
    """Nanoseconds by (layer, cause) of one rank."""
    (forward,) = analyze(timeline.recordings())[rank]
    found = {}
    for layer in forward.layers:
        for part in layer.parts:
            key = (layer.layer, part.cause)
            found[key] = found.get(key, 0) + part.ns
    return found


def part_of(timeline, layer, cause, rank=0):
    (forward,) = analyze(timeline.recordings())[rank]
    (part,) = (p for p in forward.layers[layer].parts if p.cause is cause)
    return part


def both(key, value):
    """The same for both ranks."""
    return {(rank, key): value for rank in (0, 1)}


def test_hidden_transfers_leave_no_cause():
    """The control of all that follow: 5 a transfer, 8 of compute a layer."""
    assert causes(Timeline(transfers=SLOW_FIRST)) == {}


def test_first_layer():
    """Only the prologue (3) hides the first transfer (5)."""
    assert causes(Timeline()) == {(0, Cause.FIRST): 2}


def test_link_slower_than_compute():
    """10 a transfer, 8 of compute a layer: each layer waits for the 2 that are left."""
    timeline = Timeline(layers=5, transfer=10)
    assert causes(timeline) == {(0, Cause.FIRST): 7} | {(i, Cause.LINK): 2 for i in range(1, 5)}
    part = part_of(timeline, 3, Cause.LINK)
    assert part.node == "broadcast[3]"


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_slow_link_is_no_other_cause_at_any_depth(policy, depth):
    """However far ahead transfers start: once compute has caught up, each wait is the link's alone."""
    timeline = Timeline(layers=8, transfer=10, depth=depth, policy=policy)
    assert {cause for _, cause in causes(timeline)} == {Cause.FIRST, Cause.LINK}


SLOT = Timeline(policy=ON_RELEASE, attend=9, compute=1, transfer=4, transfers=SLOW_FIRST | {5: 16})


def test_slot_not_free():
    """broadcast[5] takes 16 and may start when attend[3] ends, 11 before compute comes for it."""
    assert causes(SLOT) == {(5, Cause.SLOT): 5}
    part = part_of(SLOT, 5, Cause.SLOT)
    assert part.node == "attend[3]"
    # Prologue, three layers of 10, and attend[3]; nothing waited before.
    assert part.detail == f"attend[3] held slot 1 until {(3 + 3 * 10 + 9) / 1e6:.3f} ms into the forward"


def test_a_greater_depth_helps_against_a_slot_that_is_not_free():
    assert "prefetch depth" in ADVICE[Cause.SLOT]
    assert causes(replace(SLOT, depth=2)) == {}


HOOK = Timeline(attend=1, compute=9, transfer=4, transfers=SLOW_FIRST | {5: 16})


def test_hook_reached_late():
    """The slot is free when attend[3] ends, but broadcast[5] is handed over 9 later, at acquire(4)."""
    assert causes(HOOK) == {(5, Cause.HOOK): 6}
    assert part_of(HOOK, 5, Cause.HOOK).node == "broadcast[5]"


def test_on_release_helps_against_a_late_hook():
    assert "on_release" in ADVICE[Cause.HOOK]
    assert causes(replace(HOOK, policy=ON_RELEASE)) == {}


def test_host_time_before_a_hook_is_a_late_hook():
    """acquire(4) comes 20 late; broadcast[5] would have been in time."""
    timeline = Timeline(transfers=SLOW_FIRST | {5: 12}, idle=both(4, 20))
    assert causes(timeline) == {(5, Cause.HOOK): 4}
    without = Timeline(transfers=SLOW_FIRST | {5: 8})
    assert causes(without) == {}


def test_slot_and_hook_together():
    """As for the late hook, with the 9 and the 1 exchanged: the wait is the slot's and then the hook's."""
    timeline = replace(HOOK, attend=9, compute=1)
    assert causes(timeline) == {(5, Cause.SLOT): 5, (5, Cause.HOOK): 1}


def test_slot_and_link_together():
    """Had broadcast[5] started when the link was free, 6 before its slot was, it would still be 4 late."""
    timeline = replace(SLOT, transfers=SLOW_FIRST | {5: 21})
    assert causes(timeline) == {(5, Cause.SLOT): 6, (5, Cause.LINK): 4}


def test_stream_that_woke_late():
    """broadcast[3] starts 7 after it could, and needs 5 of the 8 that compute takes."""
    timeline = Timeline(transfers=SLOW_FIRST, wake=both(3, 7))
    assert causes(timeline) == {(3, Cause.DISPATCH): 4}
    assert causes(replace(timeline, wake=both(3, 3))) == {}


def test_compute_that_woke_late():
    timeline = Timeline(transfers=SLOW_FIRST, resume=both(2, 9))
    assert causes(timeline) == {(2, Cause.DISPATCH): 9}


def test_peer_that_comes_late():
    """Rank 1 takes 20 longer for compute[2], so joins broadcast[4] 20 later."""
    timeline = Timeline(transfers=SLOW_FIRST, computes={(1, 2): 26})
    assert causes(timeline) == {(4, Cause.PEER): 17}
    part = part_of(timeline, 4, Cause.PEER)
    assert part.detail == f"rank 1 joined broadcast[4] {20 / 1e6:.3f} ms later"
    assert causes(timeline, rank=1) == {}


def test_of_several_late_peers_the_last_is_named():
    timeline = Timeline(ranks=3, transfers=SLOW_FIRST, computes={(1, 2): 26, (2, 2): 36})
    assert causes(timeline) == {(4, Cause.PEER): 27}
    assert part_of(timeline, 4, Cause.PEER).detail.startswith("rank 2 ")
    assert causes(timeline, rank=1) == {(4, Cause.PEER): 7}


def test_peer_that_begins_late():
    timeline = Timeline(begins={1: 11})
    assert causes(timeline) == {(0, Cause.PEER): 11, (0, Cause.FIRST): 2}
    assert causes(timeline, rank=1) == {(0, Cause.FIRST): 2}


def test_peer_that_begins_late_where_forwards_are_compared_beside():
    """The first broadcast starts at once, and stands until the peer joins it."""
    timeline = Timeline(begins={1: 11}, agree=False)
    assert causes(timeline) == {(0, Cause.PEER): 11, (0, Cause.FIRST): 2}


def test_peer_hook_and_link_together():
    """Of 24, rank 1 costs 20. The link was free 3 before the hook came, and 1 would be left even then."""
    timeline = Timeline(transfers=SLOW_FIRST | {4: 12}, computes={(1, 2): 26})
    assert causes(timeline) == {(4, Cause.PEER): 20, (4, Cause.HOOK): 3, (4, Cause.LINK): 1}


@pytest.mark.parametrize(("joined", "blamed"), [(-1, True), (1, False)])
def test_a_rank_that_joins_after_the_end_has_held_nothing_up(joined, blamed):
    """A broadcast may end here before rank 1 joins it, as one that an owner only has to hand over."""
    mine, peer = Timeline(transfers=SLOW_FIRST | {4: 12}).recordings()
    (record,) = peer.forwards
    start = mine.forwards[0].spans["broadcast[4]"].end + joined
    late = {**record.spans, "broadcast[4]": Span(start, start + 2)}
    ((forward,), _) = analyze([mine, replace(peer, forwards=(replace(record, spans=late),))])
    assert (Cause.PEER in {p.cause for p in forward.layers[4].parts}) == blamed


PREVIOUS = Timeline(
    policy=ON_RELEASE, depth=3, attend=2, compute=8, transfer=4, transfers={0: 2, 5: 20, 6: 32}
)
"""broadcast[5] takes 16 longer than others, from 18 to 38, and is hidden. broadcast[6] is handed over at 25, takes
32, and compute comes for it at 63: without the 16 it would be there at 57."""


def test_previous_transfer_still_running():
    assert causes(PREVIOUS) == {(6, Cause.PREVIOUS): 7}
    part = part_of(PREVIOUS, 6, Cause.PREVIOUS)
    assert part.node == "broadcast[5]"
    assert "broadcast[5] held the link until" in part.detail
    assert f"{16 / 1e6:.3f} ms over what is usual" in part.detail


def test_without_the_slow_transfer_the_next_one_is_in_time():
    assert causes(replace(PREVIOUS, transfers={0: 2, 6: 32})) == {}


def test_previous_transfer_that_a_peer_held_up():
    """Rank 1 joins broadcast[5] 16 late; that is hidden, and what comes behind it is not."""
    timeline = replace(PREVIOUS, transfers={0: 2, 5: 4, 6: 32}, wake={(1, 5): 16})
    assert causes(timeline) == {(6, Cause.PREVIOUS): 7}
    assert "rank 1 joined broadcast[5]" in part_of(timeline, 6, Cause.PREVIOUS).detail


def test_what_compute_has_waited_for_is_not_owed_to_a_previous_transfer():
    """broadcast[3] takes 30: layer 3 pays for it, and layer 4 waits because its own does not fit."""
    timeline = Timeline(transfer=10, transfers={3: 30})
    found = causes(timeline)
    assert Cause.PREVIOUS not in {cause for _, cause in found}
    assert found[4, Cause.LINK] == 2


def test_a_larger_bundle_is_not_a_slow_transfer():
    """Layers 0, 3, 6 have 10 bytes a block and others 8: durations in that proportion are usual."""
    timeline = replace(PREVIOUS, transfer=8, transfers={0: 2, 3: 10, 5: 8, 6: 38})
    assert Cause.PREVIOUS not in {cause for _, cause in causes(timeline)}


def test_a_transfer_that_did_not_finish():
    """What a forward that failed in a transfer leaves: the transfer and the wait last until its end."""
    mine, _ = Timeline(layers=4, transfers=SLOW_FIRST).recordings()
    (record,) = mine.forwards
    at = record.spans["compute[1]"].end
    kept = {node: span for node, span in record.spans.items() if span.end <= at}
    failed = replace(
        record,
        error="TransferError: gone",
        ended=at + 50,
        spans={**kept, "broadcast[2]": Span(at - 3, at + 50)},
        waits={"completion[2]": Span(at, at + 50)},
    )
    ((forward,),) = analyze([replace(mine, forwards=(failed,))])
    layer = forward.layers[2]
    assert [(p.cause, p.ns) for p in layer.parts] == [(Cause.UNFINISHED, 50)]
    assert (layer.transfer_ns, layer.hidden_share) == (0, 0.0)
    ((sound,),) = analyze([replace(mine, forwards=(replace(failed, error=None),))])
    assert Cause.UNFINISHED not in {p.cause for p in sound.layers[2].parts}


def test_every_cause_says_what_to_try():
    assert set(ADVICE) == set(Cause)


@given(timeline=timelines())
def test_parts_add_up(timeline):
    for (forward,) in analyze(timeline.recordings()):
        for layer in forward.layers:
            assert sum(part.ns for part in layer.parts) == layer.exposed_ns
            assert all(part.ns > 0 for part in layer.parts)
            assert all((part.cause is Cause.FIRST) <= (layer.layer == 0) for part in layer.parts)
            assert Cause.UNFINISHED not in {part.cause for part in layer.parts}


@given(timeline=timelines(), data=st.data())
def test_parts_add_up_in_records_that_contradict_themselves(timeline, data):
    """Times of a dump from anywhere: in any order, and beyond the forward."""
    times = st.tuples(st.integers(0, 2000), st.integers(0, 2000)).map(lambda pair: Span(*sorted(pair)))
    changed = []
    for recording in timeline.recordings():
        (record,) = recording.forwards
        spans = data.draw(st.dictionaries(st.sampled_from(sorted(record.spans)), times))
        waits = data.draw(st.dictionaries(st.sampled_from(sorted(record.waits)), times))
        record = replace(record, spans={**record.spans, **spans}, waits={**record.waits, **waits})
        changed.append(replace(recording, forwards=(record,)))
    for (forward,) in analyze(changed):
        assert 0 <= forward.free_transfers_ns <= forward.duration_ns
        assert 0 <= forward.free_compute_ns <= forward.duration_ns
        assert sum(s.end - s.start for s in forward.critical_path) == forward.duration_ns
        for layer in forward.layers:
            assert sum(part.ns for part in layer.parts) == layer.exposed_ns
            assert all(part.ns > 0 for part in layer.parts)
            assert 0 <= layer.hidden_share <= 1


@given(timeline=timelines())
def test_no_peer_is_blamed_whose_times_are_unknown(timeline):
    recordings = timeline.recordings()
    alone = [analyze([recording])[0][0] for recording in recordings]
    elsewhere = [replace(recording, clock=f"host {recording.rank}") for recording in recordings]
    assert [forwards[0] for forwards in analyze(elsewhere)] == alone
    assert not any(p.cause is Cause.PEER for f in alone for layer in f.layers for p in layer.parts)


# Counterfactuals by playing the timeline again without one delay: up to the layer that the delay reaches first,
# both runs are the same, so what its wait loses is exactly the delay's part of it.


@given(timeline=timelines(quiet=True), layer=st.integers(1, 7), delay=st.integers(1, 40))
def test_dispatch_is_what_is_gone_without_the_late_wake(timeline, layer, delay):
    assume(layer < timeline.layers)
    late = replace(timeline, wake={(rank, layer): delay for rank in range(timeline.ranks)})
    gone = exposed(late, layer) - exposed(timeline, layer)
    assert causes(late).get((layer, Cause.DISPATCH), 0) == gone


@given(timeline=timelines(quiet=True), layer=st.integers(1, 7), delay=st.integers(1, 40))
def test_peer_is_what_is_gone_without_the_late_peer(timeline, layer, delay):
    assume(layer < timeline.layers)
    late = replace(timeline, wake={(1, layer): delay})
    gone = exposed(late, layer) - exposed(timeline, layer)
    assert causes(late).get((layer, Cause.PEER), 0) == gone


def exposed(timeline, layer, rank=0):
    (forward,) = analyze(timeline.recordings())[rank]
    return forward.layers[layer].exposed_ns

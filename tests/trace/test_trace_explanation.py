"""What an explanation adds up, what it advises, and what it says is not known."""

from dataclasses import replace

import pytest

from kvpp_dag.graph import Policy
from kvpp_dag.trace.explanation import explain
from kvpp_dag.trace.overlap import ADVICE, Cause, analyze
from tests.trace.timelines import Timeline

LINK = Timeline(layers=6, transfer=10)
SLOT = Timeline(policy=Policy.ON_RELEASE, attend=9, compute=1, transfer=4, transfers={0: 2, 5: 16})


def several():
    """Three forwards of two ranks; the waits of the second are longest."""
    played = [
        replace(LINK, transfer=transfer, began=1000 * number).recordings(number=number)
        for number, transfer in ((1, 9), (2, 30), (3, 12))
    ]
    return [
        replace(some[0], forwards=tuple(recording.forwards[0] for recording in some))
        for some in zip(*played, strict=True)
    ]


def test_the_worst_waits_come_first_and_no_more_than_asked_for():
    explanation = explain(several(), waits=10)
    waits = explanation.worst
    assert len(waits) == 10
    assert waits[0].layer.exposed_ns == 27
    assert [w.layer.exposed_ns for w in waits] == sorted(
        (w.layer.exposed_ns for w in waits), reverse=True
    )
    assert {wait.forward for wait in waits} == {2}
    assert {wait.rank for wait in waits} == {0, 1}
    assert len(explain(several(), waits=1000).worst) == 2 * 3 * 6


def test_totals_cover_all_waits_and_not_only_the_worst():
    recordings = several()
    explanation = explain(recordings, waits=1)
    forwards = [forward for some in analyze(recordings) for forward in some]
    assert sum(explanation.totals.values()) == explanation.exposed_ns
    assert explanation.exposed_ns == sum(forward.exposed_ns for forward in forwards)
    assert explanation.duration_ns == sum(forward.duration_ns for forward in forwards)
    assert explanation.free_transfers_ns == explanation.duration_ns - explanation.exposed_ns
    assert explanation.forwards == 6
    # Exposed a layer: 1, 22 and 4 of LINK over five layers, and the first layer's 6, 27 and 9.
    assert explanation.totals == {
        Cause.LINK: 2 * 5 * (1 + 22 + 4),
        Cause.FIRST: 2 * (6 + 27 + 9),
    }


@pytest.mark.parametrize(("timeline", "cause"), [(LINK, Cause.LINK), (SLOT, Cause.SLOT)])
def test_the_advice_is_that_of_the_most_expensive_cause(timeline, cause):
    advice = explain(timeline.recordings()).advice
    assert str(cause) in advice
    assert ADVICE[cause] in advice
    others = [other for other in Cause if other is not cause]
    assert not any(ADVICE[other] in advice for other in others)


def test_where_little_is_exposed_nothing_is_advised():
    explanation = explain(Timeline(layers=40, transfer=4).recordings())
    assert explanation.exposed_ns == 2
    assert "little to win" in explanation.advice
    assert not any(advice in explanation.advice for advice in ADVICE.values())


def test_without_transfers_there_is_nothing_to_hide():
    assert explain([]).advice.startswith("Nothing was transferred")


def unknown(recordings):
    return " ".join(explain(recordings).unknown)


def test_all_is_known_of_whole_recordings():
    assert explain(LINK.recordings(needed_blocks=2)).unknown == ()


def test_missing_ranks_are_named():
    ranks = replace(LINK, ranks=3).recordings(needed_blocks=2)
    assert "No recording of rank 1, 2 of stage 0" in unknown(ranks[:1])
    assert "No recording of rank 1 of stage 0" in unknown([ranks[0], ranks[2]])


def test_every_stage_needs_its_own_ranks():
    mine, peer = LINK.recordings(needed_blocks=2)
    said = unknown([mine, peer, replace(mine, stage=1)])
    assert "No recording of rank 1 of stage 1" in said
    assert "stage 0" not in said


def test_clocks_that_differ_are_named():
    mine, peer = LINK.recordings(needed_blocks=2)
    assert "different clocks" in unknown([mine, replace(peer, clock="elsewhere")])


def test_a_recording_without_a_plan_or_needed_bytes():
    said = unknown([replace(recording, plan=None) for recording in LINK.recordings()])
    assert "no plan" in said
    assert "needed" in said


@pytest.mark.parametrize("change", [{"error": "RuntimeError: gone"}, {"ended": 0}])
def test_forwards_that_failed_or_are_in_flight_are_named(change):
    mine, peer = LINK.recordings(number=7, needed_blocks=2)
    partial = replace(mine, forwards=(replace(mine.forwards[0], **change),))
    assert "Forward 7 of stage 0" in unknown([partial, peer])

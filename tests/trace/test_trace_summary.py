"""Figures of a summary: against timelines worked out by hand, and intervals against single points."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_dag.graph import Policy, build_forward
from kvpp_dag.trace import ForwardRecord, Span, summarize
from kvpp_dag.trace.summary import intersection, merge
from tests.runtime_support import run_group, small_plan
from tests.runtime_work import record

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))), max_size=12
)


def points(some):
    """The unit steps that intervals cover."""
    return {point for start, end in some for point in range(start, end)}


@given(some=intervals)
def test_merge_covers_the_same_points_with_disjoint_sorted_intervals(some):
    merged = merge(some)
    assert points(merged) == points(some)
    assert sum(end - start for start, end in merged) == len(points(some))
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(left=intervals, right=intervals)
def test_intersection_counts_the_common_points(left, right):
    expected = len(points(left) & points(right))
    assert intersection(merge(left), merge(right)) == expected
    assert intersection(merge(right), merge(left)) == expected


def test_intersection_of_unmerged_intervals_would_count_twice():
    """The control: both functions are needed."""
    twice = [(0, 10), (5, 10)]
    assert intersection(merge(twice), [(0, 10)]) == 10
    assert intersection(twice, [(0, 10), (5, 10)]) != 10


def spans(**times):
    return {_node(name): Span(*time) for name, time in times.items()}


def _node(name):
    """`attend_3` is `attend[3]`."""
    label, _, layer = name.partition("_")
    return f"{label}[{layer}]" if layer else label


def forward(ran, waits=None, *, history=True, number=1):
    graph = build_forward(
        small_plan(2, 2), rank=0, num_blocks=10, history=history, policy=Policy.ON_ACQUIRE
    )
    return ForwardRecord(
        number=number,
        graph=graph,
        began=0,
        ended=1000,
        error=None,
        needed_blocks=None,
        submitted={},
        spans=ran,
        waits=waits or {},
    )


SIZES = [320, 320]
"""Bytes of layer 0 (24 + 8 a block) and layer 1 (32 a block) over ten blocks."""

HALF_HIDDEN = forward(
    spans(
        prologue=(0, 50),
        broadcast_0=(10, 110),
        attend_0=(110, 150),
        compute_0=(150, 210),
        broadcast_1=(110, 310),
        attend_1=(310, 330),
        compute_1=(330, 400),
    ),
    spans(completion_0=(50, 110), completion_1=(210, 310)),
)
# Transfers run over 10..310; compute over 0..50, 110..210 and 310..400. Common: 40 + 100.


def test_half_hidden_transfers():
    summary = summarize([HALF_HIDDEN])
    assert summary.broadcasts == 2
    assert summary.bytes == sum(SIZES)
    assert summary.transfer_ns == 300
    assert summary.exposed_ns == 60 + 100
    assert summary.overlapped_ns == 140
    assert summary.overlap_percent == pytest.approx(100 * 140 / 300)


HIDDEN = forward(spans(prologue=(0, 500), broadcast_0=(100, 200), broadcast_1=(150, 250)))
EXPOSED = forward(spans(broadcast_0=(0, 100), attend_0=(100, 200)), spans(completion_0=(0, 100)))
QUIET = forward(spans(prologue=(0, 10), attend_0=(10, 20)), history=False)


@pytest.mark.parametrize(
    ("record", "transfer", "exposed", "percent"),
    [(HIDDEN, 150, 0, 100.0), (EXPOSED, 100, 100, 0.0), (QUIET, 0, 0, 0.0)],
)
def test_extremes(record, transfer, exposed, percent):
    summary = summarize([record])
    assert (summary.transfer_ns, summary.exposed_ns) == (transfer, exposed)
    assert summary.overlap_percent == percent


def test_several_forwards_add_up():
    summary = summarize([QUIET, HALF_HIDDEN])
    assert (summary.forwards, summary.forwards_with_history) == (2, 1)
    assert summary.transfer_ns == 300
    assert summarize([]) == summarize(iter(()))
    assert summarize([]).overlap_percent == 0.0


def test_text_says_what_the_figures_say():
    text = summarize([QUIET, HALF_HIDDEN]).text()
    assert "forwards   2, 1 of them with history" in text
    assert "broadcasts 2, 0.001 MB" in text
    assert "overlap    46.67 %" in text
    assert len(text.splitlines()) == 5


def test_figures_of_real_forwards():
    blocks = (0, 1, 0, 1, 2)
    work = partial(record, layers=5, blocks=blocks, policy=Policy.ON_ACQUIRE)
    for records in run_group("local", 2, work):
        summary = summarize(records)
        assert (summary.forwards, summary.forwards_with_history) == (5, 3)
        assert summary.broadcasts == 3 * 5
        assert summary.bytes == 3 * sum(n.bytes for n in records[1].graph.broadcasts)
        longest = sum(record.ended - record.began for record in records)
        assert 0 < summary.transfer_ns <= longest
        assert 0 < summary.exposed_ns <= longest
        assert 0 <= summary.overlapped_ns <= summary.transfer_ns

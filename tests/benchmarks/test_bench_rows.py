"""What the benchmarks compute from what they measure; no duration is asserted."""

import itertools

import pytest
import torch

from tests.benchmarks import bench_growth, bench_schedulers
from tests.benchmarks.emulated import ideal, predicted
from tests.benchmarks.rows import KEYS, Bar, check_row, make_row, take_turns
from tests.benchmarks.run import table, with_tables
from tests.benchmarks.schedulers import BASELINES, Compute, run_forward


def test_a_row_is_computed_from_its_values():
    row = make_row("a against b", "ms", [2, 4, 6], [1, 1, 2], bar=Bar(limit=3, sense=">="))
    assert tuple(row) == KEYS
    assert (row["value"], row["baseline"]) == (4, 1)
    assert row["ratio"] == 3  # the median of 2, 4 and 3
    assert row["spread"] == [2, 4]
    assert (row["bar"], row["holds"]) == ("ratio >= 3", True)
    check_row(row)


@pytest.mark.parametrize(
    ("bar", "holds"),
    [
        (Bar(limit=3.5, sense=">="), False),
        (Bar(limit=3.5, sense="<="), True),
        (Bar(limit=3.5, sense="<=", of="value"), False),
        (Bar(limit=4, sense=">=", of="value"), True),
    ],
)
def test_a_bar_is_held_against_what_it_names(bar, holds):
    assert make_row("", "", [2, 4, 6], [1, 1, 2], bar=bar)["holds"] is holds


def test_one_round_has_no_spread():
    assert make_row("", "", [3], [2])["spread"] == [1.5, 1.5]


@pytest.mark.parametrize(
    "wrong",
    [{"holds": True}, {"bar": "ratio >= 1"}, {"spread": [3, 2]}, {"ratio": None}, {"more": 1}],
)
def test_a_row_of_another_shape_is_refused(wrong):
    with pytest.raises(ValueError, match="row"):
        check_row(make_row("a", "ms", [2, 4, 6], [1, 1, 2]) | wrong)


def test_ways_take_turns_after_a_round_that_warms_up():
    ran = []
    clock = itertools.count().__next__
    ways = {name: lambda name=name: ran.append(name) for name in "ab"}
    seconds = take_turns(ways, 2, together=lambda: ran.append("together"), clock=clock)
    assert ran == ["together", "a", "together", "b"] * 3
    assert seconds == {"a": [1, 1], "b": [1, 1]}


@pytest.mark.parametrize(("transfer", "compute"), [(1, 4), (2, 4), (4, 4), (8, 4)])
def test_the_ideal_of_equal_layers_is_the_formula(transfer, compute):
    layers = 16
    formula = transfer + (layers - 1) * max(transfer, compute) + compute
    assert ideal([transfer] * layers, [compute] * layers) == formula
    for on_release, depth in itertools.product((False, True), (1, 2)):
        found = predicted(
            [transfer] * layers, [1] * layers, [compute - 1] * layers, depth=depth, on_release=on_release
        )
        assert found == formula


def test_the_ideal_of_uneven_layers():
    # Arrive at 2, 3 and 6; computed at 3, 7 and 8.
    assert ideal([2, 1, 3], [1, 4, 1]) == 8


@pytest.mark.parametrize(
    ("on_release", "depth", "seconds"),
    [
        # The last transfer may start at 3, when layer 1 is asked for: it arrives at 7.
        (False, 1, 9),
        # It may start at 2, when layer 0 has attended: it arrives at 6.
        (True, 1, 8),
        # It may start at 0 and does at 2.
        (True, 2, 8),
        (False, 2, 8),
    ],
)
def test_the_recurrence_of_the_policies(on_release, depth, seconds):
    assert predicted([1, 1, 4], [1] * 3, [1] * 3, depth=depth, on_release=on_release) == seconds
    assert ideal([1, 1, 4], [2] * 3) == 8


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_transfers_every_layer_once_and_in_order(name):
    sent, layers = [], 5
    scheduler = BASELINES[name]([lambda i=i: sent.append(i) for i in range(layers)])
    for forward in range(1, 3):
        run_forward(scheduler, [Compute(attend=0, rest=0)] * layers)
        assert sent == list(range(layers)) * forward


def test_schedulers_give_rows_of_the_promised_shape(monkeypatch):
    monkeypatch.setattr(bench_schedulers, "LONGER", 1e-3)
    rows = bench_schedulers._emulated(1.0, True, 2)
    for row in rows:
        check_row(row)
    names = " ".join(row["name"] for row in rows)
    for way in (*BASELINES, *bench_schedulers.OURS):
        assert f"{way} against the ideal bound" in names
    assert table("schedulers", rows).row_count == len(rows)


def test_a_page_gets_its_tables_replaced():
    rows = [
        make_row("kept", "ms", [1, 1], [2, 2], bar=Bar(limit=1, sense="<=")),
        make_row("lost", "ms", [3, 3], [2, 2], bar=Bar(limit=1, sense="<=")),
    ]
    page = "top\n<!-- a -->\nstale\n<!-- end -->\nmiddle\n<!-- b -->\nuntouched\n<!-- end -->\n"
    found = with_tables(page, {"a": rows})
    assert "stale" not in found
    assert "untouched" in found
    assert "1 of 2 bars hold. Missed:" in found
    assert found.count("| lost | 3.0 | ms | 2.0 | 1.5 | 1.5 to 1.5 | ratio <= 1 | no |\n") == 2
    assert found.count("| kept | 1.0 | ms | 2.0 | 0.5 | 0.5 to 0.5 | ratio <= 1 | yes |\n") == 1
    assert with_tables(found, {"a": rows}) == found
    with pytest.raises(ValueError, match="no place for c"):
        with_tables(page, {"c": rows})


def test_the_fitted_exponent_of_a_power():
    sizes = [1, 2, 4, 8]
    assert bench_growth.exponent(sizes, [3 * size**1.5 for size in sizes]) == 1.5
    assert bench_growth.exponent(sizes, [3] * 4) == pytest.approx(0, abs=1e-9)


def test_requests_lie_apart_and_inside_the_cache():
    case = bench_growth.Case(requests=4, blocks=1 << 10)
    used = torch.from_numpy(bench_growth._blocks_in_use(case))
    assert len(used.unique()) == 4 * bench_growth.BLOCKS_OF_A_REQUEST
    assert int((used.diff() > 1).sum()) == 3
    assert int(used.max()) < case.blocks

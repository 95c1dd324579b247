from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan import Component, plan_model, plan_stage
from kvpp_dag.plan.budget import model_blocks
from tests.builders import spec, specs, stage


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 4))
def test_owned_bundles_add_up_to_the_stage(layers, ranks, depth):
    plan = stage(layers, ranks, depth)
    owned = [bundle for rank in range(ranks) for bundle in plan.owned(rank)]
    assert tuple(owned) == plan.bundles
    assert all(plan.owners[b.ordinal] == r for r in range(ranks) for b in plan.owned(r))


@given(st.integers(1, 40), st.integers(1, 4))
def test_layers_in_flight_at_once_have_slots_of_their_own(layers, depth):
    plan = stage(layers, 2, depth)
    assert plan.slots == depth + 1
    for first in range(max(layers - depth, 0)):
        window = [plan.slot(i) for i in range(first, first + depth + 1)]
        assert len(set(window)) == len(window)
        assert set(window) <= set(range(plan.slots))


def test_the_largest_bundle_sizes_the_slots():
    assert plan_stage([spec(0, 8), spec(1, 8, 4), spec(2, 9)], ranks=2).largest_bundle == 12
    assert plan_stage([], ranks=2).largest_bundle == 0


def test_a_depth_below_one_is_refused():
    with pytest.raises(ConfigError, match="depth is 0"):
        stage(2, 2, 0)


def test_uneven_stages_and_an_empty_one():
    """Case 24: stages of 2, 16, 16, 14 layers, and one without attention."""
    sizes = [2, 16, 16, 14, 0]
    starts = [0, 2, 18, 34, 48]
    model = plan_model([specs(n, first=s) for n, s in zip(sizes, starts, strict=True)], ranks=4)
    assert [len(p.bundles) for p in model.stages] == sizes
    assert [b.spec.index for p in model.stages for b in p.bundles] == list(range(48))
    empty = model.stages[-1]
    assert (empty.bundles, empty.owners) == ((), ())
    assert all(empty.owned(rank) == () for rank in range(4))


def test_the_smallest_stage_decides_and_an_empty_one_does_not():
    """Case 24. Uniform layers of 8 bytes: worst rank of 16 layers on TP4 is 4 owned + 2 slots."""
    small, large = [spec(0), spec(1)], [spec(i) for i in range(2, 18)]
    available = 48 * 100
    assert model_blocks(plan_model([small, large, []], ranks=4), available) == 100
    assert model_blocks(plan_model([small, []], ranks=4), available) == 200
    assert model_blocks(plan_model([[], []], ranks=4), available) == 0


BASE = [spec(0, 8, 4), spec(1, 8), spec(2, 8, 4)]


def _hash(reported=BASE, *, ranks=2, depth=1):
    return plan_stage(reported, ranks=ranks, depth=depth).layout_hash


def _with_components(*components):
    parts = tuple(Component(name=name, bytes_per_block=size) for name, size in components)
    return [replace(BASE[0], components=parts), *BASE[1:]]


def test_two_ranks_that_report_the_same_agree():
    assert _hash() == _hash(list(reversed(BASE)))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(_hash(_with_components(("c1", 4), ("c0", 8))), id="component-order"),
        pytest.param(_hash(_with_components(("c0", 4), ("c1", 8))), id="page-bytes-same-total"),
        pytest.param(_hash(_with_components(("c0", 8), ("c1", 5))), id="page-bytes"),
        pytest.param(_hash(_with_components(("c0", 8), ("scale", 4))), id="component-name"),
        pytest.param(_hash(_with_components(("c0", 12))), id="component-count"),
        pytest.param(_hash(BASE[:2]), id="layer-count"),
        pytest.param(_hash([*BASE[:2], spec(3, 8, 4, layer="layers.2")]), id="layer-index"),
        pytest.param(_hash([*BASE[:2], spec(2, 8, 4, layer="other.2")]), id="layer-name"),
        pytest.param(_hash(depth=2), id="depth"),
    ],
)
def test_the_layout_hash_changes_with_whatever_ranks_must_agree_on(other):
    """Case 27."""
    assert other != _hash()


def test_the_layout_hash_changes_with_the_owners():
    plan = plan_stage(BASE, ranks=2)
    assert replace(plan, owners=(0, 1, 1)).layout_hash != plan.layout_hash


def test_the_layout_hash_changes_with_the_group_size_even_if_no_owner_does():
    two, four = (plan_stage(BASE[:2], ranks=ranks) for ranks in (2, 4))
    assert two.owners == four.owners
    assert two.layout_hash != four.layout_hash


def test_drafts_are_never_sent_so_the_layout_hash_ignores_them():
    """Case 27."""
    assert _hash([*BASE, spec(None, 64, layer="mtp", draft=True)]) == _hash()

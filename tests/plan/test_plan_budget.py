from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpp_dag.errors import CapacityError
from kvpp_dag.plan import budget, capacity, capacity_multiplier, plan_model, plan_stage
from tests.builders import spec, stage

SIZES = st.lists(st.integers(1, 2000), min_size=1, max_size=30)
RANKS = st.integers(1, 16)
DEPTHS = st.integers(1, 4)
BYTES = st.integers(0, 10_000_000)
NOTHING = budget.Capacity(without=0, with_kvpp=0, with_payload_full=0)


def _plan(sizes, ranks, depth=1, drafts=(), *, staging=False):
    reported = [spec(i, size) for i, size in enumerate(sizes)]
    reported += [spec(None, size, layer=f"mtp.{i}", draft=True) for i, size in enumerate(drafts)]
    return plan_stage(reported, ranks=ranks, depth=depth, staging=staging)


def test_one_example_in_full():
    """Layers of 10, 20, 30 bytes and a draft of 5 on two ranks: 30 | 30 owned, 2 slots of 30."""
    plan = _plan([10, 20, 30], 2, drafts=[5])
    assert [budget.owned_bytes_per_block(plan, rank) for rank in (0, 1)] == [30, 30]
    assert budget.draft_bytes_per_block(plan) == 5
    assert budget.scratch_bytes_per_block(plan) == 60
    assert [budget.physical_bytes_per_block(plan, rank) for rank in (0, 1)] == [95, 95]
    assert budget.logical_bytes_per_block(plan) == 65
    assert budget.physical_blocks(plan, 0, 959) == 10
    assert budget.physical_blocks(plan, 0, 949) == 9


@given(SIZES, RANKS, DEPTHS, st.lists(st.integers(1, 2000), max_size=2), BYTES)
def test_the_planner_arrives_at_the_blocks_that_the_worker_counted(
    sizes, ranks, depth, drafts, available
):
    plan = _plan(sizes, ranks, depth, drafts)
    every_layer = sum(sizes) + sum(drafts)
    for rank in range(ranks):
        blocks = budget.physical_blocks(plan, rank, available)
        assert budget.logical_budget(plan, blocks) // every_layer == blocks


@given(SIZES, RANKS, DEPTHS, BYTES)
def test_the_blocks_fit_and_one_more_does_not(sizes, ranks, depth, available):
    plan = _plan(sizes, ranks, depth)
    for rank in range(ranks):
        owned = sum(b.bytes_per_block for b in plan.bundles if plan.owners[b.ordinal] == rank)
        needed = owned + (depth + 1) * max(sizes)
        blocks = budget.physical_blocks(plan, rank, available)
        assert blocks * needed <= available < (blocks + 1) * needed


@given(SIZES, RANKS, DEPTHS, BYTES)
def test_with_staging_the_blocks_fit_beside_both_halves_and_one_more_does_not(
    sizes, ranks, depth, available
):
    plan = _plan(sizes, ranks, depth, staging=True)
    for rank in range(ranks):
        owned = sum(b.bytes_per_block for b in plan.bundles if plan.owners[b.ordinal] == rank)

        def needed(blocks, owned=owned):
            halves = 2 * plan.staging_blocks(blocks) * max(sizes)
            return blocks * (owned + (depth + 1) * max(sizes)) + halves

        blocks = budget.physical_blocks(plan, rank, available)
        assert needed(blocks) <= available < needed(blocks + 1)


@given(SIZES, RANKS, DEPTHS)
def test_each_slot_costs_one_largest_bundle(sizes, ranks, depth):
    less, more = _plan(sizes, ranks, depth), _plan(sizes, ranks, depth + 1)
    for rank in range(ranks):
        extra = budget.physical_bytes_per_block(more, rank) - budget.physical_bytes_per_block(less, rank)
        assert extra == max(sizes)


@given(SIZES, RANKS, DEPTHS, BYTES, st.integers(0, 100_000))
def test_more_memory_never_holds_less(sizes, ranks, depth, available, extra):
    plan = _plan(sizes, ranks, depth)
    less, more = capacity(plan, available), capacity(plan, available + extra)
    assert less.with_kvpp <= more.with_kvpp
    assert less.without <= more.without


@given(st.integers(1, 60), RANKS, DEPTHS, BYTES)
def test_more_ranks_or_fewer_slots_never_hold_less(layers, ranks, depth, available):
    sizes = [16] * layers
    blocks = capacity(_plan(sizes, ranks, depth), available).with_kvpp
    assert capacity(_plan(sizes, ranks + 1, depth), available).with_kvpp >= blocks
    assert capacity(_plan(sizes, ranks, depth + 1), available).with_kvpp <= blocks


@given(SIZES, RANKS, DEPTHS, BYTES)
def test_the_worst_rank_decides(sizes, ranks, depth, available):
    plan = _plan(sizes, ranks, depth)
    per_rank = [budget.physical_blocks(plan, rank, available) for rank in range(ranks)]
    assert capacity(plan, available).with_kvpp == min(per_rank)


def test_a_stage_that_caches_nothing_has_no_limit():
    """Case 24."""
    plan = plan_stage([], ranks=4)
    assert budget.physical_blocks(plan, 0, 1000) is None
    assert capacity(plan, 1000) == NOTHING
    budget.check_fits(plan, 0, 10**9, 1000)
    assert capacity_multiplier(plan_model([[]], ranks=4)) == 1.0


def test_memory_that_is_gone_already_holds_no_blocks():
    plan = stage(3, 2)
    assert budget.physical_blocks(plan, 0, -5) == 0
    assert capacity(plan, -5) == NOTHING


def test_few_layers_per_stage_warn_of_less_capacity():
    """6 layers, TP2, PP2: three local layers, of which a rank owns two beside two slots."""
    plan = stage(3, 2)
    found = capacity(plan, 100_000)
    assert found.with_kvpp < found.without
    assert str(found.with_kvpp) in found.warning
    assert str(found.without) in found.warning
    assert "enable_kvpp" in found.warning


def test_staging_that_makes_the_loss_is_named_and_payload_full_is_advised():
    """4 layers, TP2: two owned and two slots are what the engine holds; the halves come on top."""
    plan = _plan([1152] * 4, 2, staging=True)
    found = capacity(plan, 1 << 30)
    assert found.with_kvpp < found.without == found.with_payload_full
    assert f"holds {found.with_kvpp} blocks where {found.without} fit" in found.warning
    assert '"kvpp": {"payload": "full"}' in found.warning
    assert f"holds {found.with_payload_full}." in found.warning
    assert "enable_kvpp" not in found.warning
    assert "scratch" not in found.warning
    assert capacity(_plan([1152] * 4, 2), 1 << 30).warning is None


def test_staging_is_not_blamed_for_a_loss_that_the_slots_make():
    found = capacity(_plan([1152] * 3, 2, staging=True), 1 << 30)
    assert found.with_kvpp < found.with_payload_full < found.without
    assert "scratch buffers" in found.warning
    assert "enable_kvpp" in found.warning
    assert "payload" not in found.warning


@pytest.mark.parametrize("staging", [False, True])
def test_kvpp_loses_where_the_documentation_says(staging):
    """Equal bundles: owned layers and slots are more than the layers, with staging as many or more."""
    outcomes = set()
    for layers, ranks, depth in product(range(1, 13), (2, 3, 4, 8), (1, 2, 3)):
        held = -(-layers // ranks) + depth + 1
        loses = held >= layers if staging else held > layers
        found = capacity(_plan([1152] * layers, ranks, depth, staging=staging), 1 << 30)
        assert (found.warning is not None) == loses, (layers, ranks, depth)
        outcomes.add(loses)
    assert outcomes == {False, True}


def test_enough_layers_do_not_warn():
    found = capacity(stage(12, 4), 100_000)
    assert found.with_kvpp > found.without
    assert found.warning is None
    assert budget.Capacity(without=7, with_kvpp=7, with_payload_full=7).warning is None


@given(SIZES, RANKS, BYTES, st.integers(1, 50))
def test_an_override_past_what_fits_is_refused_with_both_numbers(sizes, ranks, available, extra):
    """Case 21."""
    plan = _plan(sizes, ranks)
    fitting = budget.physical_blocks(plan, 0, available)
    with pytest.raises(CapacityError) as caught:
        budget.check_fits(plan, 0, fitting + extra, available)
    assert isinstance(caught.value, ValueError)
    assert f"{fitting + extra} KV cache blocks" in str(caught.value)
    assert f"room for {fitting} " in str(caught.value)


@given(SIZES, RANKS, BYTES)
def test_an_override_that_fits_is_used_as_it_is(sizes, ranks, available):
    """Case 21."""
    plan = _plan(sizes, ranks)
    fitting = budget.physical_blocks(plan, 0, available)
    assume(fitting > 0)
    budget.check_fits(plan, 0, fitting, available)
    budget.check_fits(plan, 0, fitting - 1, available)

"""The capacity multiplier against the blocks that workers report and the engine counts, with staging."""

import pytest

from kvpp_dag.plan import (
    Ownership,
    budget,
    capacity,
    capacity_multiplier,
    load_preset,
    plan_model,
    preset_stages,
)
from tests.builders import spec

AVAILABLE = 64 << 30
PAGE = 16 * 1152
ROUNDING = 1e-4  # of the smallest count of blocks below


def equal(layers):
    return [spec(i, PAGE) for i in range(layers)]


def uneven(layers):
    """Every third layer is larger, and a draft is held by every rank."""
    reported = [spec(i, PAGE, *([PAGE // 3] if i % 3 == 0 else [])) for i in range(layers)]
    return [*reported, spec(None, PAGE, layer="mtp.0", draft=True)]


def engine_blocks(model):
    """What the engine arrives at: every worker reports bytes, and the smallest quotient decides."""
    return min(
        budget.logical_budget(stage, budget.physical_blocks(stage, rank, AVAILABLE))
        // budget.logical_bytes_per_block(stage)
        for stage in model.stages
        for rank in range(stage.ranks)
    )


def true_ratio(model):
    without = min(capacity(stage, AVAILABLE).without for stage in model.stages)
    return engine_blocks(model) / without


CASES = [(4, 2, 1), (12, 2, 1), (12, 4, 3), (30, 3, 2), (61, 8, 1), (61, 16, 4), (5, 8, 2)]


@pytest.mark.parametrize("specs", [equal, uneven])
@pytest.mark.parametrize(("layers", "ranks", "depth"), CASES)
@pytest.mark.parametrize("ownership", list(Ownership))
def test_the_multiplier_is_the_ratio_of_blocks_in_a_large_cache(specs, layers, ranks, depth, ownership):
    asked = {"ranks": ranks, "depth": depth, "ownership": ownership}
    whole = plan_model([specs(layers)], **asked)
    staged = plan_model([specs(layers)], **asked, staging=True)
    assert true_ratio(whole) == pytest.approx(capacity_multiplier(whole), rel=ROUNDING)
    assert true_ratio(staged) == pytest.approx(capacity_multiplier(staged), rel=ROUNDING)
    # The control: halves that are left out are more than rounding.
    assert true_ratio(staged) < capacity_multiplier(whole) * (1 - 20 * ROUNDING)


def test_stages_of_a_model_are_counted_together():
    stages = [equal(20), [spec(i, 2 * PAGE) for i in range(20, 28)]]
    whole = plan_model(stages, ranks=4)
    staged = plan_model(stages, ranks=4, staging=True)
    assert all(stage.staging for stage in staged.stages)
    assert engine_blocks(staged) == budget.model_blocks(staged, AVAILABLE)
    assert true_ratio(staged) == pytest.approx(capacity_multiplier(staged), rel=ROUNDING)
    assert true_ratio(staged) < capacity_multiplier(whole) * (1 - 20 * ROUNDING)


@pytest.mark.parametrize(
    ("specs", "ranks", "whole", "staged"),
    [
        (equal(4), 2, 1.0, 0.970),
        (equal(61), 8, 6.1, 6.025),
        (preset_stages(load_preset("glm-5.2-lic8"))[0], 8, 6.340, 6.271),
    ],
)
def test_known_multipliers(specs, ranks, whole, staged):
    assert round(capacity_multiplier(plan_model([specs], ranks=ranks)), 3) == whole
    assert round(capacity_multiplier(plan_model([specs], ranks=ranks, staging=True)), 3) == staged


def test_a_small_cache_holds_less_than_the_limit_says():
    """4 layers of 18 KiB, TP2: beside 24 MiB a half is an eighth of the cache."""
    (plan,) = (model := plan_model([equal(4)], ranks=2, staging=True)).stages
    found = capacity(plan, 24 << 20)
    assert plan.staging_blocks(found.with_kvpp) == -(-found.with_kvpp // 8)
    assert found.with_kvpp / found.without < capacity_multiplier(model)


def test_one_rank_has_no_staging():
    alone = plan_model([equal(4)], ranks=1, staging=True)
    assert alone == plan_model([equal(4)], ranks=1)

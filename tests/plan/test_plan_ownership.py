from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan import Ownership, load_preset, plan_model, plan_stage, preset_stages
from kvpp_dag.plan.budget import capacity, owned_bytes_per_block, worst_physical_bytes_per_block
from kvpp_dag.plan.ownership import owner_of, partition, partition_bytes
from tests.builders import spec

LAYERS = st.integers(0, 200)
RANKS = st.integers(1, 64)


@given(LAYERS, RANKS)
def test_every_layer_has_one_owner_and_ranges_follow_each_other(layers, ranks):
    parts = partition(layers, ranks)
    assert len(parts) == ranks
    assert [i for part in parts for i in part] == list(range(layers))


@given(LAYERS, RANKS)
def test_no_rank_owns_two_layers_more_than_another(layers, ranks):
    lengths = [len(part) for part in partition(layers, ranks)]
    assert max(lengths) - min(lengths) <= 1


@given(LAYERS, RANKS)
def test_the_longer_ranges_come_first(layers, ranks):
    lengths = [len(part) for part in partition(layers, ranks)]
    assert lengths == sorted(lengths, reverse=True)
    longer = sum(length > min(lengths) for length in lengths)
    assert longer == layers % ranks


@pytest.mark.parametrize(
    ("layers", "ranks", "expected"),
    [
        (7, 3, [[0, 1, 2], [3, 4], [5, 6]]),
        (6, 3, [[0, 1], [2, 3], [4, 5]]),
        (2, 4, [[0], [1], [], []]),
        (0, 2, [[], []]),
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_examples(layers, ranks, expected):
    assert [list(part) for part in partition(layers, ranks)] == expected


@given(LAYERS, RANKS)
def test_owner_of_inverts_the_partition(layers, ranks):
    parts = partition(layers, ranks)
    owners = owner_of(parts)
    assert len(owners) == layers
    assert all(i in parts[owner] for i, owner in enumerate(owners))


@pytest.mark.parametrize(("layers", "ranks", "word"), [(4, 0, "0 ranks"), (-1, 2, "-1 layers")])
def test_impossible_sizes_are_refused(layers, ranks, word):
    with pytest.raises(ConfigError, match=word):
        partition(layers, ranks)


SIZES = st.lists(st.integers(1, 40), max_size=9)
FEW = st.integers(1, 6)


def every_partition(layers, ranks):
    """All contiguous partitions, empty ranges included, by where each range stops."""
    for inner in combinations_with_replacement(range(layers + 1), ranks - 1):
        yield tuple(range(start, stop) for start, stop in pairwise((0, *inner, layers)))


def owned(sizes, parts):
    return [sum(sizes[i] for i in part) for part in parts]


@given(SIZES, FEW)
def test_by_bytes_no_contiguous_partition_has_a_better_worst_rank(sizes, ranks):
    parts = partition_bytes(sizes, ranks)
    assert parts in set(every_partition(len(sizes), ranks))
    best = min(max(owned(sizes, other)) for other in every_partition(len(sizes), ranks))
    assert max(owned(sizes, parts)) == best


@given(SIZES, FEW)
def test_by_bytes_the_rule_leaves_one_choice(sizes, ranks):
    """Of all: least worst rank, then least sum of squares, then the longest ranges first."""

    def rule(parts):
        sums = owned(sizes, parts)
        return max(sums), sum(s * s for s in sums), [-len(part) for part in parts]

    assert partition_bytes(sizes, ranks) == min(every_partition(len(sizes), ranks), key=rule)


@given(LAYERS, RANKS, st.integers(1, 10**9))
def test_by_bytes_bundles_of_one_size_are_split_as_by_count(layers, ranks, size):
    assert partition_bytes([size] * layers, ranks) == partition(layers, ranks)


def test_by_bytes_is_not_by_count():
    """The control of the test above, and that neither counts the layers nor fills rank after rank."""
    assert owner_of(partition_bytes([9, 1, 1, 1], 2)) == (0, 1, 1, 1)
    assert owner_of(partition(4, 2)) == (0, 0, 1, 1)
    assert owner_of(partition_bytes([2, 2, 2, 2, 8], 3)) == (0, 0, 1, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([], 2, [[], []]),
        ([5], 3, [[0], [], []]),
        ([1, 9], 3, [[0], [1], []]),
        ([3, 1, 1, 1], 1, [[0, 1, 2, 3]]),
        ([1 << 62, 1 << 62, 1], 2, [[0], [1, 2]]),
    ],
)
def test_by_bytes_examples(sizes, ranks, expected):
    assert [list(part) for part in partition_bytes(sizes, ranks)] == expected


def test_by_bytes_needs_a_rank():
    with pytest.raises(ConfigError, match="0 ranks"):
        partition_bytes([1], 0)


def test_glm_by_count_and_by_bytes():
    stages = preset_stages(load_preset("glm-5.2-lic8"))

    def bytes_by_rank(plan):
        return [owned_bytes_per_block(plan, rank) for rank in range(8)]

    (by_count,) = plan_model(stages, ranks=8).stages
    (by_bytes,) = plan_model(stages, ranks=8, ownership=Ownership.BYTES).stages
    assert bytes_by_rank(by_count) == [12040, 11910, 11780, 11910, 11780, 11910, 10628, 10628]
    assert bytes_by_rank(by_bytes) == [10888, 11910, 11780, 11910, 11780, 11910, 11780, 10628]
    assert (worst_physical_bytes_per_block(by_count), worst_physical_bytes_per_block(by_bytes)) == (
        14604,
        14474,
    )
    assert by_count.layout_hash != by_bytes.layout_hash


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=30), RANKS, st.integers(0, 10**7))
def test_by_bytes_never_holds_fewer_blocks(sizes, ranks, available):
    reported = [spec(i, size) for i, size in enumerate(sizes)]
    by_count, by_bytes = (
        capacity(plan_stage(reported, ranks=ranks, ownership=o), available) for o in Ownership
    )
    assert by_bytes.with_kvpp >= by_count.with_kvpp
    assert by_bytes.without == by_count.without


def test_by_count_is_the_default():
    uneven = [spec(0, 9), *[spec(i, 1) for i in range(1, 4)]]
    owners = {o: plan_stage(uneven, ranks=2, ownership=o).owners for o in Ownership}
    assert plan_stage(uneven, ranks=2).owners == owners[Ownership.COUNT] != owners[Ownership.BYTES]

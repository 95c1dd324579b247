import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan.ownership import owner_of, partition

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

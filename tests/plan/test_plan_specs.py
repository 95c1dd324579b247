import pytest

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan import Component
from kvpp_dag.plan.specs import split_targets
from tests.builders import spec, specs


def test_targets_are_ordered_by_index_not_by_report():
    bundles, drafts = split_targets([spec(5), spec(3), spec(4)])
    assert [(b.ordinal, b.layer) for b in bundles] == [(0, "layers.3"), (1, "layers.4"), (2, "layers.5")]
    assert drafts == ()


def test_a_later_stage_counts_its_ordinals_from_zero():
    """Case 23: global layer indices 38..77 are ordinals 0..39."""
    bundles, _ = split_targets(specs(40, first=38))
    assert [b.ordinal for b in bundles] == list(range(40))
    assert [b.spec.index for b in bundles] == list(range(38, 78))
    assert bundles[0].layer == "layers.38"


def test_a_bundle_holds_all_components_of_its_layer():
    (bundle,), _ = split_targets([spec(0, 512, 128, 2)])
    assert bundle.bytes_per_block == 642


def test_components_lie_one_after_another_each_with_all_blocks():
    (bundle,), _ = split_targets([spec(0, 512, 128, 2)])
    offsets = [bundle.component_offset(name, 10) for name in ("c0", "c1", "c2")]
    assert offsets == [0, 5120, 6400]
    with pytest.raises(KeyError):
        bundle.component_offset("c3", 10)


def test_a_draft_may_share_a_targets_index_and_is_not_a_bundle():
    """Case 22."""
    draft = spec(1, 64, layer="mtp.0", draft=True)
    bundles, drafts = split_targets([*specs(2), draft])
    assert [b.layer for b in bundles] == ["layers.0", "layers.1"]
    assert drafts == (draft,)


def test_a_draft_needs_no_index():
    """Case 22."""
    draft = spec(None, layer="eagle.attn", draft=True)
    assert split_targets([spec(0), draft])[1] == (draft,)


def test_a_draft_may_be_in_another_group_and_not_replicated():
    draft = spec(None, layer="eagle.attn", draft=True, group="full", replicated=False)
    assert split_targets([spec(0), draft])[1] == (draft,)


@pytest.mark.parametrize(
    ("reported", "words"),
    [
        pytest.param([spec(None, layer="odd.attn")], ["odd.attn", "no layer index"], id="no-index"),
        pytest.param(
            [spec(4, layer="a"), spec(4, layer="b")], ["'a'", "'b'", "index 4"], id="same-index"
        ),
        pytest.param(
            [spec(4, layer="a"), spec(5, layer="a")], ["'a'", "reported twice"], id="same-name"
        ),
        pytest.param(
            [spec(4, layer="a"), spec(4, layer="a", draft=True)],
            ["'a'", "reported twice"],
            id="draft-named-as-target",
        ),
        pytest.param(
            [spec(0), spec(1, shares_cache_of="layers.0")],
            ["'layers.1'", "'layers.0'"],
            id="shared-cache",  # case 25
        ),
        pytest.param(
            [spec(0), spec(None, layer="mtp", draft=True, shares_cache_of="layers.0")],
            ["'mtp'", "'layers.0'"],
            id="draft-with-shared-cache",  # case 25
        ),
        pytest.param(
            [spec(0, group="mla"), spec(1, group="sliding")],
            ["hybrid", "mla, sliding"],
            id="hybrid",  # case 28
        ),
        pytest.param(
            [spec(0), spec(7, replicated=False)], ["'layers.7'", "already splits"], id="not-replicated"
        ),
        pytest.param([spec(3, components=())], ["'layers.3'", "without components"], id="empty"),
        pytest.param(
            [spec(3, components=(Component(name="main", bytes_per_block=4),) * 2)],
            ["'layers.3'", "main, main"],
            id="same-component-name",
        ),
    ],
)
def test_what_cannot_be_partitioned_is_refused_with_its_name(reported, words):
    with pytest.raises(ConfigError) as caught:
        split_targets(reported)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("size", [0, -8])
def test_a_component_needs_bytes(size):
    with pytest.raises(ConfigError, match=f"'scales' has {size} bytes"):
        Component(name="scales", bytes_per_block=size)

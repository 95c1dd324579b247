import json
from importlib.resources import files

import pytest
from pydantic import ValidationError

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan import Preset, budget, capacity_multiplier, load_preset, plan_model, preset_names
from kvpp_dag.plan.presets import preset_stages

GOLDEN = {
    "deepseek-v2-lite": {2: (1.688,), 4: (3.000,), 8: (4.500,), 16: (6.750,)},
    "deepseek-v3": {2: (1.848, 1.824), 4: (3.389, 3.263), 8: (6.100, 5.636), 16: (10.167, 8.857)},
    "kimi-k2": {2: (1.848,), 4: (3.389,), 8: (6.100,), 16: (10.167,)},
    "glm-5": {2: (1.902, 1.881), 4: (3.545, 3.435), 8: (6.500, 6.077), 16: (11.143, 9.875)},
    "glm-5.2-lic8": {2: (1.888, 1.865), 4: (3.492, 3.377), 8: (6.340, 5.909), 16: (10.625, 9.391)},
    "glm-5.2-fp8": {2: (1.877, 1.853), 4: (3.453, 3.335), 8: (6.226, 5.790), 16: (10.270, 9.061)},
}
CELLS = [
    pytest.param(name, ranks, mtp, value, id=f"{name}-tp{ranks}{'-mtp' if mtp else ''}")
    for name, row in GOLDEN.items()
    for ranks, values in row.items()
    for mtp, value in zip((False, True), values, strict=False)
]


def _plan(name, ranks, *, mtp=False, pp=None):
    return plan_model(preset_stages(load_preset(name), pp=pp, mtp=mtp), ranks=ranks)


@pytest.mark.parametrize(("name", "ranks", "mtp", "value"), CELLS)
def test_capacity_multiplier_of_the_golden_table(name, ranks, mtp, value):
    assert round(capacity_multiplier(_plan(name, ranks, mtp=mtp)), 3) == value


def test_the_golden_table_is_complete():
    assert len(CELLS) == 2 * 4 + 4 * 8


def test_a_model_without_mtp_has_no_drafts_to_hold():
    for name in ("deepseek-v2-lite", "kimi-k2"):
        assert _plan(name, 4, mtp=True) == _plan(name, 4, mtp=False)


def test_owned_bytes_by_rank_of_glm_5_2():
    (plan,) = _plan("glm-5.2-lic8", 8).stages
    owned = [budget.owned_bytes_per_block(plan, rank) for rank in range(8)]
    assert owned == [12040, 11910, 11780, 11910, 11780, 11910, 10628, 10628]
    assert budget.worst_physical_bytes_per_block(plan) == 14604


def test_two_stages_of_glm_5_2():
    model = _plan("glm-5.2-lic8", 8, pp=(38, 40))
    assert max(budget.logical_bytes_per_block(s) for s in model.stages) == 47380
    assert max(budget.worst_physical_bytes_per_block(s) for s in model.stages) == 8714
    assert round(capacity_multiplier(model), 3) == 5.437


def test_the_second_stage_holds_layers_38_to_77():
    """Case 23."""
    first, second = _plan("glm-5.2-lic8", 8, pp=(38, 40)).stages
    assert [b.spec.index for b in second.bundles] == list(range(38, 78))
    assert [b.ordinal for b in second.bundles] == list(range(40))
    assert len(first.bundles) == 38
    assert [len(second.owned(rank)) for rank in range(8)] == [5] * 8


def test_glm_5_2_has_an_indexer_cache_on_21_layers():
    """Case 26: 21 bundles of two caches (the indexer is int8 and its scales), 57 of one."""
    (plan,) = _plan("glm-5.2-lic8", 8).stages
    names = [[c.name for c in b.spec.components] for b in plan.bundles]
    with_indexer = [i for i, parts in enumerate(names) if parts == ["main", "indexer", "scales"]]
    assert with_indexer == [0, 1, 2, *range(6, 75, 4)]
    assert len(with_indexer) == 21
    assert sum(parts == ["main"] for parts in names) == 57


def test_draft_layers_of_glm_5_2_have_an_indexer():
    (plan,) = _plan("glm-5.2-lic8", 8, mtp=True).stages
    assert [(d.index, d.bytes_per_block) for d in plan.drafts] == [(78, 1282)]


def test_drafts_belong_to_the_last_stage():
    first, second = _plan("deepseek-v3", 4, mtp=True, pp=(30, 31)).stages
    assert first.drafts == ()
    assert [d.layer for d in second.drafts] == ["model.layers.61"]


@pytest.mark.parametrize("pp", [(30, 30), (62,), (), (70, -9)])
def test_stages_must_add_up_to_the_model(pp):
    with pytest.raises(ConfigError, match="has 61"):
        preset_stages(load_preset("deepseek-v3"), pp=pp)


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'gpt-2'.*deepseek-v3, .*kimi-k2"):
        load_preset("gpt-2")


SHAPES = {  # target layers, draft layers, bytes of a layer with an indexer, layers with an indexer
    "deepseek-v2-lite": (27, 0, 1152, 0),
    "deepseek-v3": (61, 1, 1152, 0),
    "deepseek-v3.2": (61, 1, 788, 61),
    "glm-5": (78, 1, 788, 78),
    "glm-5.2-fp8": (78, 1, 788, 21),
    "glm-5.2-lic8": (78, 1, 1282, 21),
    "kimi-k2": (61, 0, 1152, 0),
}


def test_every_preset_is_listed_here():
    assert preset_names() == tuple(sorted(SHAPES))


@pytest.mark.parametrize("name", SHAPES)
def test_preset_files_state_their_source_and_the_known_shape(name):
    raw = json.loads(files("kvpp_dag.plan").joinpath("preset_data", f"{name}.json").read_text())
    assert raw["name"] == name
    assert len(raw["source"]) > 20
    assert "config.json" in raw["source"]
    assert not raw["main"].keys() & raw.get("indexer", {}).keys()
    layers, drafts, largest, indexers = SHAPES[name]
    preset = load_preset(name)
    (reported,) = preset_stages(preset, mtp=True)
    assert sum(not s.draft for s in reported) == layers
    assert sum(s.draft for s in reported) == drafts
    assert max(s.bytes_per_block for s in reported) == largest
    assert sum(len(s.components) > 1 for s in reported if not s.draft) == indexers


@pytest.mark.parametrize(
    "change", [{"layers": 0}, {"mtp_layers": -1}, {"source": None}, {"heads": 128}, {"main": 1152}]
)
def test_a_preset_file_with_another_shape_is_refused(change):
    good = {"name": "x", "model": "X", "source": "s", "layers": 2, "mtp_layers": 0, "main": {"main": 8}}
    assert Preset.model_validate(good).layers == 2
    with pytest.raises(ValidationError):
        Preset.model_validate(good | change)

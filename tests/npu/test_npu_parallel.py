"""Pipeline stages, experts and draft layers on vllm-ascend's own code."""

import pytest

from tests.npu.engine import Engine, off_on_control, same
from tests.npu.prompts import two_rounds

pytestmark = [pytest.mark.npu, pytest.mark.timeout(1800)]

ARGUMENTS = {"max_num_batched_tokens": 256, "kv_cache_memory_bytes": 48 << 20}


def runs(models, library, model: str, **arguments):
    engine = Engine(
        model=models[model], rounds=two_rounds(), arguments=ARGUMENTS | arguments, faults=["delays"]
    )
    return off_on_control(engine, {}, library=library)


def check(off, on, control) -> None:
    assert same(off, on) == len(off.tokens)
    assert on.blocks > off.blocks
    assert same(off, control) < len(off.tokens)


def test_two_stages_of_two_ranks(models, library):
    off, on, control = runs(models, library, "deep", pipeline_parallel_size=2)
    check(off, on, control)
    assert {(stats["stage"], stats["rank"]) for stats in on.rpc["kvpp_stats"]} == {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }


def test_experts_spread_over_the_ranks(models, library):
    off, on, control = runs(models, library, "experts", enable_expert_parallel=True)
    check(off, on, control)
    assert on.operators["npu_moe_init_routing_custom"] > 0


def test_draft_layers_stay_whole_on_every_rank(models, library):
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    off, on, control = runs(models, library, "mtp", speculative_config=speculation)
    check(off, on, control)
    assert on.accepted > 0
    for stats in on.rpc["kvpp_stats"]:
        assert len(stats["draft_layers"]) == 1
        assert len(stats["layers_owned"]) == 4

"""What only a worker's cache specs tell, on vLLM's own spec objects: refused before memory is allocated."""

from typing import Any

import pytest
import torch

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan import StagePlan, plan_stage
from kvpp_vllm.specs import cache_specs

COMMON: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def planned(specs: dict[str, Any], **more: Any) -> StagePlan:
    return plan_stage(cache_specs(specs, **more), ranks=2)


@pytest.fixture
def mla() -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return {name(layer): MLAAttentionSpec(**COMMON) for layer in range(3)}


def test_one_kind_of_cache_of_their_own_is_planned(mla):
    assert len(planned(mla).bundles) == 3
    assert len(planned(mla, drafts=[name(2)]).bundles) == 2


def test_a_platforms_own_class_of_mla_specs_is_planned():
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    class PlatformMLAAttentionSpec(MLAAttentionSpec):
        pass

    assert (
        len(planned({name(layer): PlatformMLAAttentionSpec(**COMMON) for layer in range(3)}).bundles)
        == 3
    )


def test_a_layer_that_uses_another_layers_cache_is_refused(mla):
    with pytest.raises(ConfigError, match=f"'{name(3)}' uses the cache of '{name(0)}'.*enable_kvpp off"):
        planned(mla, shared={name(3): name(0)})


def test_a_draft_that_uses_a_target_layers_cache_is_refused(mla):
    with pytest.raises(ConfigError, match=f"'{name(3)}' uses the cache of '{name(1)}'.*enable_kvpp off"):
        planned(mla, drafts=[name(2), name(3)], shared={name(3): name(1)})


def test_sliding_window_layers_beside_others_are_refused_as_hybrid(mla):
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    window = SlidingWindowMLASpec(**COMMON, sliding_window=64)
    with pytest.raises(
        ConfigError, match=r"hybrid.*MLAAttentionSpec, SlidingWindowMLASpec.*enable_kvpp off"
    ):
        planned(mla | {name(1): window})


def test_linear_attention_beside_mla_is_refused_as_hybrid(mla):
    from vllm.v1.kv_cache_interface import MambaSpec

    state = MambaSpec(block_size=16, shapes=((2, 512),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match=r"hybrid.*MLAAttentionSpec, MambaSpec.*enable_kvpp off"):
        planned(mla | {name(1): state})


def test_caches_that_tensor_parallelism_splits_are_refused():
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    split = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    with pytest.raises(
        ConfigError, match=f"'{name(0)}' keeps a KV cache that tensor parallelism already"
    ):
        planned({name(0): split, name(1): split})

"""The one KV cache group that KVPP serves, as vLLM makes groups of its own specs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpp_dag.errors import ConfigError
from kvpp_vllm.allocation import block_size

COMMON: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}


def name(layer: int, part: str = "attn") -> str:
    return f"model.layers.{layer}.self_attn.{part}"


def configured(specs: dict[str, Any]) -> SimpleNamespace:
    """The part of vLLM's KVCacheConfig that is read, for these layers."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheLayout

    settings = SimpleNamespace(
        attention_config=None,
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC),
        speculative_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    )
    return SimpleNamespace(kv_cache_groups=get_kv_cache_groups(settings, specs))


@pytest.fixture
def mla() -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return {name(layer): MLAAttentionSpec(**COMMON) for layer in range(3)}


def test_dense_layers_and_a_draft_like_them_are_one_group(mla):
    assert block_size(configured(mla)) == 16


def test_sparse_layers_with_indexers_are_one_group(mla):
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    indexer = MLAAttentionSpec(**COMMON | {"head_size": 132, "dtype": torch.uint8})
    config = configured(mla | {name(layer, "indexer"): indexer for layer in (0, 2)})
    assert block_size(config) == 16


def test_a_stage_without_caches_has_blocks_of_a_token():
    assert block_size(SimpleNamespace(kv_cache_groups=[])) == 1


def test_a_draft_layer_in_a_group_of_its_own_is_refused(mla):
    """Targets of one kind pass the plan, which does not look at the kind of drafts."""
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    config = configured(mla | {name(3): SlidingWindowMLASpec(**COMMON, sliding_window=64)})
    with pytest.raises(
        ConfigError,
        match=r"4 KV cache groups \(3 of MLAAttentionSpec, 1 of SlidingWindowMLASpec\).*enable_kvpp off",
    ):
        block_size(config)

"""KVPP's storage behind vLLM's own views of a KV cache."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import Arena


def engine_views(
    arena: Arena,
    kv_cache_config: Any,
    layout: Any,
    kernel_block_sizes: list[int] | None,
) -> dict[str, torch.Tensor]:
    """What vLLM's `allocate_kv_cache` returns, over the arena: a [B, H, N, C] view per layer name.

    Each layer is laid out by itself, block after block, whatever the engine's layout says of several
    layers: a bundle has to be contiguous. Layers that this rank does not own alias a scratch slot.
    """
    from vllm.v1.kv_cache_interface import KVCacheTensor, create_kv_cache_views  # noqa: PLC0415

    blocks = kv_cache_config.num_blocks
    views: dict[str, torch.Tensor] = {}
    for name, storage in _storages(arena).items():
        group_id, spec = _spec_of(kv_cache_config, name)
        page = storage.shape[1]
        tensor = KVCacheTensor(
            size=storage.numel(), layers=[name], layer_stride=storage.numel(), block_stride=page
        )
        kernel_block = kernel_block_sizes[group_id] if kernel_block_sizes else None
        raw = storage.view(-1).view(torch.int8)
        (views[name],) = create_kv_cache_views(raw, spec, blocks, layout, tensor, kernel_block)
    return views


def block_size(kv_cache_config: Any) -> int:
    """Tokens of a block in the one cache group that KVPP serves; 1 for a stage that caches nothing.

    Raises ConfigError if there are more groups: each has blocks of its own, and one list of them is sent.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        kinds = Counter(type(group.kv_cache_spec).__name__ for group in groups)
        found = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        raise ConfigError(
            f"vLLM has put the layers into {len(groups)} KV cache groups ({found}); KVPP needs one group for "
            "all layers, draft layers too, so run this model with enable_kvpp off."
        )
    size: int = groups[0].kv_cache_spec.block_size if groups else 1
    return size


def _storages(arena: Arena) -> dict[str, torch.Tensor]:
    """Storage of every engine layer by name: uint8 [blocks, page bytes]."""
    plan: StagePlan = arena.plan
    found = {
        component.name: arena.component(bundle.ordinal, component.name)
        for bundle in plan.bundles
        for component in bundle.spec.components
    }
    for spec in plan.drafts:
        for component in spec.components:
            found[component.name] = arena.draft(spec.layer, component.name)
    return found


def _spec_of(kv_cache_config: Any, name: str) -> tuple[int, Any]:
    """Cache group and spec of one layer."""
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        if name in group.layer_names:
            spec = group.kv_cache_spec
            per_layer: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
            return group_id, per_layer[name] if per_layer is not None else spec
    raise KeyError(name)

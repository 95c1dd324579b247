"""vllm-ascend's KV cache specs as kvpp_dag's cache specs: a component for each tensor that a layer's cache is made of.

A raw cache is a tuple of tensors there, one a part. Version 0.23 has one spec for all parts of a layer; 0.30.0rc2 has
another for the indexer, as a layer of its own.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kvpp_dag.errors import NotActiveError
from kvpp_dag.plan import CacheSpec, Component
from kvpp_vllm.specs import shared_specs

Parts = dict[str, int]
"""Bytes of a block by part, in the order of vllm-ascend's tuple."""


def cache_specs(
    specs: Mapping[str, Any],
    layers: Mapping[str, Any],
    *,
    drafts: Collection[str] = (),
    shared: Mapping[str, str] | None = None,
) -> list[CacheSpec]:
    """Cache specs of one worker; `layers` are the engine's modules with a cache, by name.

    Caches of one layer index become one bundle, the main cache first. `drafts` are the names that the engine's
    speculator owns; `shared` maps layers without a cache of their own to the one they use. Raises NotActiveError
    for a spec whose parts are not known.
    """
    from vllm.model_executor.models.utils import extract_layer_index  # noqa: PLC0415

    targets: dict[int, list[str]] = {}
    for name in specs:
        if name not in drafts:
            targets.setdefault(extract_layer_index(name), []).append(name)
    result = [_spec(specs, layers, sorted(names, key=len), i) for i, names in targets.items()]
    result += [_spec(specs, layers, [name], None) for name in specs if name in drafts]
    return result + shared_specs(shared or {})


def parts_of(name: str, spec: Any, layer: Any) -> Parts:
    """Bytes of a block of each part of one spec. Raises NotActiveError where they do not add up to its block."""
    size = _bytes_of(spec.dtype)
    tokens = spec.block_size * spec.num_kv_heads
    if hasattr(spec, "cache_sparse_li_c4"):  # 0.30's indexer
        tokens *= spec.sfa_dcp_replicated_indexer_size
        parts = {"indexer": tokens * spec.head_size * size}
        if spec.scale_dim:
            parts["scale"] = tokens * spec.scale_dim * _bytes_of(spec.scale_dtype)
    elif getattr(spec, "sparse_head_dim", None) is not None:
        parts = _sparse_parts(spec, tokens, size)
    elif getattr(spec, "uses_packed_sfa_main_cache", False):
        parts = {"packed": spec.page_size_bytes}
    else:
        parts = {
            "latent": tokens * layer.kv_lora_rank * size,
            "rope": tokens * layer.qk_rope_head_dim * size,
        }
    if sum(parts.values()) != spec.page_size_bytes:
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: a block of layer {name!r} has {spec.page_size_bytes} bytes, and "
            f"its parts {parts} have {sum(parts.values())}; this way to keep a cache is not known. Run this model "
            "with KVPP off."
        )
    return parts


def _sparse_parts(spec: Any, tokens: int, size: int) -> Parts:
    """0.23's layers with an indexer, or with another's choice of tokens."""
    latent, rope, index = spec.sparse_head_dim
    quantized = _bytes_of(spec.c8_k_cache_dtype)
    if spec.cache_sparse_sfa_c8:
        parts = {"packed": tokens * latent * quantized}
    else:
        parts = {"latent": tokens * latent * size, "rope": tokens * rope * size}
    if index:
        tokens *= spec.sfa_dcp_replicated_indexer_size
        parts["indexer"] = tokens * index * (quantized if spec.cache_sparse_li_c8 else size)
        if spec.cache_sparse_li_c8:
            parts["scale"] = tokens * _bytes_of(spec.c8_k_scale_cache_dtype)
    return parts


def _spec(
    specs: Mapping[str, Any], layers: Mapping[str, Any], names: list[str], index: int | None
) -> CacheSpec:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: PLC0415

    return CacheSpec(
        layer=names[0],
        index=index,
        components=tuple(
            Component(name=f"{name}.{part}", bytes_per_block=count)
            for name in names
            for part, count in parts_of(name, specs[name], layers[name]).items()
        ),
        draft=index is None,
        group=type(specs[names[0]]).__name__,
        replicated=all(isinstance(specs[name], MLAAttentionSpec) for name in names),
    )


def _bytes_of(dtype: Any) -> int:
    size: int = dtype.itemsize
    return size

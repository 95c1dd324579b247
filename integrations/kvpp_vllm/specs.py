"""vLLM's KV cache specs as kvpp_dag's cache specs."""

from collections.abc import Collection, Mapping
from typing import Any

from kvpp_dag.plan import CacheSpec, Component


def cache_specs(
    specs: Mapping[str, Any],
    *,
    drafts: Collection[str] = (),
    shared: Mapping[str, str] | None = None,
) -> list[CacheSpec]:
    """Cache specs of one worker from its layer-name to KVCacheSpec mapping.

    vLLM counts an indexer as a layer of its own; caches of one layer index become the components of one
    bundle, named by vLLM's layer names, the main cache first. `drafts` are the names that the engine's
    speculator owns; `shared` maps layers without a cache of their own to the one they use.
    """
    from vllm.model_executor.models.utils import extract_layer_index  # noqa: PLC0415

    targets: dict[int, list[str]] = {}
    for name in specs:
        if name not in drafts:
            targets.setdefault(extract_layer_index(name), []).append(name)
    result = [_spec(specs, _main_first(specs, names), i, draft=False) for i, names in targets.items()]
    result += [_spec(specs, [name], None, draft=True) for name in specs if name in drafts]
    return result + shared_specs(shared or {})


def shared_specs(shared: Mapping[str, str]) -> list[CacheSpec]:
    """Layers without a cache of their own, by the one they use; the plan refuses them."""
    return [
        CacheSpec(
            layer=name,
            index=None,
            components=(Component(name=name, bytes_per_block=1),),
            shares_cache_of=target,
        )
        for name, target in shared.items()
    ]


def _main_first(specs: Mapping[str, Any], names: list[str]) -> list[str]:
    """Indexers last: bundles with and without one share scratch slots, and vLLM zeroes new blocks once
    per address, for which caches at one address must have blocks of one size.
    """
    return sorted(names, key=lambda name: getattr(specs[name], "cache_role", None) == "indexer")


def _spec(specs: Mapping[str, Any], names: list[str], index: int | None, *, draft: bool) -> CacheSpec:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec  # noqa: PLC0415

    return CacheSpec(
        layer=names[0],
        index=index,
        components=tuple(
            Component(name=name, bytes_per_block=specs[name].page_size_bytes) for name in names
        ),
        draft=draft,
        group=type(specs[names[0]]).__name__,
        # A platform may have a class of its own that is one of vLLM's.
        replicated=all(isinstance(specs[name], MLAAttentionSpec) for name in names),
    )

"""KVPP's storage as the raw tensors that vllm-ascend reshapes into its caches."""

from collections.abc import Callable
from typing import Any

import torch

from kvpp_dag.errors import NotActiveError
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import Arena

Raw = dict[str, tuple[torch.Tensor, ...]]
"""By layer, a flat int8 tensor for each part of its cache."""


def raw_tensors(arena: Arena, runner: Any, kv_cache_config: Any, allocate: Callable[[Any], Any]) -> Raw:
    """What the runner's `_allocate_kv_cache_tensors` returns, over the arena.

    `allocate` is the runner's own. It is called for memory without bytes: it tells which parts each layer has, and
    sets what the reshape reads later. Raises NotActiveError where its parts are others than the plan's.
    """
    device = runner.device
    runner.device = torch.device("meta")
    try:
        expected = allocate(kv_cache_config)
    finally:
        runner.device = device
    found = _storages(arena)
    raw: Raw = {}
    for layer, parts in expected.items():
        raw[layer] = tuple(t.view(-1).view(torch.int8) for t in found.pop(layer, ()))
        theirs, ours = ([part.numel() for part in each] for each in (parts, raw[layer]))
        if theirs != ours:
            raise NotActiveError(
                f"KVPP was asked for and cannot be active: vllm-ascend keeps the cache of layer {layer!r} in tensors "
                f"of {theirs} bytes, and the plan in {ours}. Run this model with KVPP off."
            )
    if found:
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: vllm-ascend allocates nothing for {', '.join(found)}, which "
            "are in the plan. Run this model with KVPP off."
        )
    return raw


def _storages(arena: Arena) -> dict[str, list[torch.Tensor]]:
    """Storage of every engine layer, its parts in order: uint8 [blocks, bytes of a part]."""
    plan: StagePlan = arena.plan
    found: dict[str, list[torch.Tensor]] = {}
    for bundle in plan.bundles:
        for component in bundle.spec.components:
            layer = component.name.rpartition(".")[0]
            found.setdefault(layer, []).append(arena.component(bundle.ordinal, component.name))
    for spec in plan.drafts:
        for component in spec.components:
            layer = component.name.rpartition(".")[0]
            found.setdefault(layer, []).append(arena.draft(spec.layer, component.name))
    return found

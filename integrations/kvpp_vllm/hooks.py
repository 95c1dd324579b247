"""The per-layer hooks: acquire before a layer's first cache access, release after its last."""

from collections.abc import Callable, Mapping
from typing import Any

from kvpp_dag.errors import NotActiveError
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import ForwardPass


def hook_layers(forward: ForwardPass, layers: Mapping[str, Any]) -> None:
    """Hook every target layer of the plan; `layers` are the engine's attention modules by name.

    Only these instances are touched: draft layers, and other models of the process, never call a hook.
    Raises NotActiveError for a layer whose class lacks a seam.
    """
    for ordinal, names in enumerate(_names(forward.plan)):
        for name in names:
            layer = layers[name]
            before = _method(layer, name, "prepare_kv_cache_update")
            attend = _method(layer, name, "forward_impl")
            layer.prepare_kv_cache_update = _acquiring(forward, ordinal, before)
            layer.forward_impl = _releasing(forward, ordinal, attend)


def _names(plan: StagePlan) -> list[list[str]]:
    return [[c.name for c in bundle.spec.components] for bundle in plan.bundles]


def _method(layer: Any, name: str, method: str) -> Callable[..., Any]:
    found = getattr(layer, method, None)
    if not callable(found):
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: layer {name!r} is a {type(layer).__name__}, "
            f"which has no {method}; its cache would be used without waiting for it."
        )
    return found  # type: ignore[no-any-return]


def _acquiring(forward: ForwardPass, ordinal: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_kv_cache_update(*args: Any, **kwargs: Any) -> Any:
        # Dummy and profiling runs call layers outside any forward; they have no history to wait for.
        if forward.active:
            forward.acquire(ordinal)
        return original(*args, **kwargs)

    return prepare_kv_cache_update


def _releasing(forward: ForwardPass, ordinal: int, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_impl(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if forward.active:
            forward.release(ordinal)
        return output

    return forward_impl

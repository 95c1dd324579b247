"""The per-layer hooks: acquire before a bundle's first access, release after its last."""

from collections.abc import Callable, Mapping
from typing import Any

from kvpp_dag.errors import NotActiveError
from kvpp_dag.plan import Bundle
from kvpp_dag.runtime import ForwardPass
from kvpp_vllm.attention import Attention, attention_of
from kvpp_vllm.seams import check_seams

Method = Callable[..., Any]


def hook_layers(forward: ForwardPass, layers: Mapping[str, Any]) -> None:
    """Hook every target layer of the plan; `layers` are the engine's modules with a cache, by name.

    Only these instances are touched: draft layers, and other models of the process, never call a hook.
    Raises NotActiveError for a layer whose class is unknown or lacks a seam.
    """
    for bundle in forward.plan.bundles:
        layer = layers[bundle.layer]
        attention = attention_of(layer, bundle.layer)
        for path in _acquiring_methods(attention, bundle, layer, layers):
            wrap(layer, bundle.layer, path, acquiring, forward, bundle.ordinal)
        wrap(layer, bundle.layer, attention.release, releasing, forward, bundle.ordinal)


def _acquiring_methods(
    attention: Attention, bundle: Bundle, layer: Any, layers: Mapping[str, Any]
) -> tuple[str, ...]:
    """Methods that may be the first to touch the bundle, their seams checked."""
    check_seams(attention.seams)
    others = [c.name for c in bundle.spec.components if c.name != bundle.layer]
    if not others:
        return attention.acquire
    indexer_cache = getattr(getattr(layer, "indexer", None), "k_cache", None)
    if [layers[name] for name in others] != [indexer_cache]:
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: layer {bundle.layer!r} shares its index with the "
            f"caches {', '.join(others)}; expected one, that of its own indexer, since it is not known "
            "when anything else is used. Run this model with enable_kvpp off."
        )
    check_seams(attention.seams_indexer)
    return (*attention.acquire_indexer, *attention.acquire)


def wrap(
    layer: Any,
    name: str,
    path: str,
    wrapper: Callable[[ForwardPass, int, Method], Method],
    forward: ForwardPass,
    ordinal: int,
) -> None:
    """Replace the method at `path` by its wrapped self, on this layer's own objects."""
    *parts, method = path.split(".")
    owner = layer
    for part in parts:
        owner = getattr(owner, part, None)
    original = getattr(owner, method, None)
    if not callable(original):
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: layer {name!r} is a {type(layer).__name__}, "
            f"which has no {path}; its cache would be used without waiting for it."
        )
    setattr(owner, method, wrapper(forward, ordinal, original))


def acquiring(forward: ForwardPass, ordinal: int, original: Method) -> Method:
    """`original`, with the layer acquired before it."""

    def acquire_first(*args: Any, **kwargs: Any) -> Any:
        # Dummy and profiling runs call layers outside any forward; they have no history to wait for.
        if forward.active:
            forward.acquire(ordinal)
        return original(*args, **kwargs)

    return acquire_first


def releasing(forward: ForwardPass, ordinal: int, original: Method) -> Method:
    """`original`, with the layer released after it."""

    def release_after(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if forward.active:
            forward.release(ordinal)
        return output

    return release_after

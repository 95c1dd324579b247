"""The per-layer hooks: acquire before a bundle's first access, release after its last."""

from collections.abc import Callable, Mapping
from typing import Any

from kvpp_dag.errors import NotActiveError
from kvpp_dag.plan import Bundle
from kvpp_dag.runtime import ForwardPass
from kvpp_vllm.attention import attention_of
from kvpp_vllm.checks import INDEXER_OP
from kvpp_vllm.operators import acquire_in_indexer_op
from kvpp_vllm.seams import check_seams

Method = Callable[..., Any]


def hook_layers(forward: ForwardPass, layers: Mapping[str, Any], *, compiled: bool) -> Any:
    """Hook every target layer of the plan; `layers` are the engine's modules with a cache, by name.

    Only these instances are touched: draft layers, and other models of the process, never call a hook. Where
    vLLM has `compiled` the model, an indexer's hook lies in its operator; keep what this returns as long as the
    layers are used. Raises NotActiveError for a layer whose class is unknown or lacks a seam.
    """
    in_operator: dict[str, int] = {}
    for bundle in forward.plan.bundles:
        layer, name, ordinal = layers[bundle.layer], bundle.layer, bundle.ordinal
        attention = attention_of(layer, name)
        check_seams(attention.seams)
        indexer = _indexer_cache(bundle, layer, layers)
        if indexer is not None:
            check_seams(attention.seams_indexer)
        acquire = acquiring
        if indexer is not None and attention.acquire_indexer and compiled:
            in_operator[indexer] = ordinal
            acquire = _acquired_before
        elif indexer is not None:
            for path in attention.acquire_indexer:
                wrap(layer, name, path, acquiring, forward, ordinal)
        for path in attention.acquire:
            wrap(layer, name, path, acquire, forward, ordinal)
        wrap(layer, name, attention.release, releasing, forward, ordinal)
    return acquire_in_indexer_op(forward, in_operator) if in_operator else None


def _indexer_cache(bundle: Bundle, layer: Any, layers: Mapping[str, Any]) -> str | None:
    """The name of the bundle's indexer cache, if it has one; it may have no other beside the layer's own."""
    others = [c.name for c in bundle.spec.components if c.name != bundle.layer]
    if not others:
        return None
    indexer_cache = getattr(getattr(layer, "indexer", None), "k_cache", None)
    if [layers[name] for name in others] != [indexer_cache]:
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: layer {bundle.layer!r} shares its index with the "
            f"caches {', '.join(others)}; expected one, that of its own indexer, since it is not known "
            "when anything else is used. Run this model with enable_kvpp off."
        )
    return others[0]


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


def _acquired_before(forward: ForwardPass, ordinal: int, original: Method) -> Method:
    """For a layer whose indexer's operator acquires: by now it has run, or the indexer's cache was used too early."""

    def check_first(*args: Any, **kwargs: Any) -> Any:
        if forward.active and forward.held != ordinal:
            raise NotActiveError(
                f"KVPP was asked for and cannot be active: the indexer of layer "
                f"{forward.plan.bundles[ordinal].layer!r} has not run as the operator {INDEXER_OP}, in which a "
                "compiled model waits for its caches; add --enforce-eager."
            )
        return original(*args, **kwargs)

    return check_first


def releasing(forward: ForwardPass, ordinal: int, original: Method) -> Method:
    """`original`, with the layer released after it."""

    def release_after(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        if forward.active:
            forward.release(ordinal)
        return output

    return release_after

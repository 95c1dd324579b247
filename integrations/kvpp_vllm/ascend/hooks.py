"""The per-layer hooks on vllm-ascend's attention implementations, one object a layer.

The adaptor that writes caches in one fused operator is one for all layers and differs from chip to chip, so nothing of
it is replaced: what calls it is wrapped instead, on the layer's own implementation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpp_dag.errors import NotActiveError
from kvpp_dag.runtime import ForwardPass
from kvpp_vllm.hooks import acquiring, releasing, wrap

_MLA = "vllm_ascend.attention.mla_v1.AscendMLAImpl"
_SFA = "vllm_ascend.attention.sfa_v1.AscendSFAImpl"


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Methods of an implementation: entering any of `acquire` may be the first access, returning from `release` is
    the last. `acquire_fused` are those where one of the settings `fused` is on.
    """

    acquire: tuple[str, ...]
    release: str
    fused: tuple[str, ...] = ()
    acquire_fused: tuple[str, ...] = ()


IMPLEMENTATIONS = {
    # The output projection lies before the end of `forward`: it is let go a little late, and never early.
    _MLA: Implementation(
        acquire=("exec_kv_decode", "exec_kv_prefill"),
        release="forward",
        fused=("enable_mlapo", "fa_quant_layer"),
        acquire_fused=("forward",),
    ),
    _SFA: Implementation(
        acquire=("exec_kv", "_sfa_preprocess_with_mlapo", "_sfa_preprocess_with_prolog_v3"),
        release="_execute_sparse_flash_attention_process",
    ),
}
"""By the class whose `forward` runs, of version 0.23.0.post1."""

OWN_RELEASE = "forward"
"""Where a version with a KVPP of its own is done with a layer: it offers a place to wait and none to let go."""


class LayerHook:
    """What such a version calls before a layer's first access: its own scheduler, or this."""

    def __init__(self, forward: ForwardPass, ordinal: int) -> None:
        self._forward = forward
        self._ordinal = ordinal

    def wait_for_layer(self, layer_name: str) -> None:
        """Acquire the layer, if a forward is under way."""
        if self._forward.active:
            self._forward.acquire(self._ordinal)


def hook_layers(forward: ForwardPass, layers: Mapping[str, Any]) -> None:
    """Hook every target layer of the plan; `layers` are the engine's modules with a cache, by name.

    Raises NotActiveError for a layer whose implementation is unknown.
    """
    for bundle in forward.plan.bundles:
        layer = layers[bundle.layer]
        known = _known(layer.impl, bundle.layer)
        if hasattr(layer.impl, "layerwise_kv_cache_hook"):
            layer.impl.layerwise_kv_cache_hook = LayerHook(forward, bundle.ordinal)
            wrap(layer, bundle.layer, f"impl.{OWN_RELEASE}", releasing, forward, bundle.ordinal)
            continue
        is_fused = any(getattr(layer.impl, name) for name in known.fused)
        for method in (*known.acquire, *(known.acquire_fused if is_fused else ())):
            wrap(layer, bundle.layer, f"impl.{method}", acquiring, forward, bundle.ordinal)
        wrap(layer, bundle.layer, f"impl.{known.release}", releasing, forward, bundle.ordinal)


def _known(implementation: Any, name: str) -> Implementation:
    kind = type(implementation)
    running = next((c for c in kind.__mro__ if "forward" in vars(c)), kind)
    found = IMPLEMENTATIONS.get(f"{running.__module__}.{running.__qualname__}")
    if found is None:
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: layer {name!r} runs {running.__module__}."
            f"{running.__qualname__}.forward, and this version knows where {', '.join(IMPLEMENTATIONS)} use their "
            "caches; its cache would be used without waiting for it. Run this model with KVPP off."
        )
    return found

"""What KVPP refuses under vllm-ascend, decided on the finished configuration: one sentence each, naming the setting."""

from collections.abc import Iterator
from typing import Any

from kvpp_vllm.ascend.own import own_kvpp
from kvpp_vllm.checks import general_refusals

HOOK_OP = "vllm::mla_forward"
"""vllm-ascend's custom operator in which a layer's attention, and so its hooks, run: captured pieces end at it."""


def ascend_refusals(vllm_config: Any) -> Iterator[str]:
    """Why this configuration cannot run with KVPP; nothing if it can."""
    yield from general_refusals(vllm_config)
    yield from _graphs(vllm_config.compilation_config)
    if own_kvpp() and vllm_config.use_v2_model_runner:
        yield (
            "vllm-ascend's Model Runner V2 is not extended; set VLLM_USE_V2_MODEL_RUNNER=0, or leave KVPP to "
            "vllm-ascend"
        )


def _graphs(compilation: Any) -> Iterator[str]:
    """A replayed graph runs no Python, so every hook has to lie between the pieces that are captured."""
    mode = compilation.cudagraph_mode
    if not mode:
        return
    if mode.has_full_cudagraphs():
        yield (
            f"cudagraph_mode {mode.name} replays attention without the per-layer hook; set cudagraph_mode to "
            "PIECEWISE in --compilation-config, or add --enforce-eager"
        )
    elif HOOK_OP not in (compilation.splitting_ops or ()):
        yield (
            f"splitting_ops lacks {HOOK_OP}, so the per-layer hook would lie inside a captured piece; leave "
            "splitting_ops out of --compilation-config, or add --enforce-eager"
        )

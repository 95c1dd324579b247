"""A control for draft layers: called in every worker (`Workload.before`)."""

from typing import Any


def forget(worker: Any) -> None:
    """Let the draft layers of Model Runner V1 find their caches empty whenever they attend."""
    runner = worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context
    for name in runner.drafter._draft_attn_layer_names:
        if hasattr(layers[name], "forward_impl"):  # an indexer's cache attends to nothing
            _empty_first(layers[name])


def _empty_first(layer: Any) -> None:
    attend = layer.forward_impl

    def forward_impl(*args: Any, **kwargs: Any) -> Any:
        layer.kv_cache.zero_()
        return attend(*args, **kwargs)

    layer.forward_impl = forward_impl

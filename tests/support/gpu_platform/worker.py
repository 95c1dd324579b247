"""What vLLM's GPU worker needs changed to run on the test device: names of CUDA, and kernels of GPUs."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.ops import merge_attn_states
from vllm.v1.worker import gpu_worker

from tests.device.build import NAME
from tests.support.gpu_platform import FAULTS, Faults, attention, experts, faults


def register() -> None:
    """Put the changes in place in this process, once."""
    if isinstance(gpu_worker.torch, _Torch):
        return
    gpu_worker.torch = _Torch()
    faults.install()
    stock = gpu_worker.Worker.init_device

    def init_device(self: Any) -> None:
        self.set_faults(self.vllm_config.additional_config.get(FAULTS, {}))
        kept = self.device_config
        self.device_config = SimpleNamespace(device_type="cuda", device=NAME)
        try:
            stock(self)
        finally:
            self.device_config = kept

    init_device.__wrapped__ = stock  # type: ignore[attr-defined]  # its signature is a seam of KVPP
    gpu_worker.Worker.init_device = init_device
    gpu_worker.Worker._maybe_get_memory_pool_context = lambda self, tag: nullcontext()
    gpu_worker.Worker.device_facts = _device_facts
    gpu_worker.Worker.set_faults = _set_faults
    gpu_worker.kernel_warmup = lambda worker: None  # kernels of GPUs, and models that need torchvision
    ops.gather_and_maybe_dequant_cache = attention.gather_context
    experts.register()
    for module in (merge_attn_states, mla_attention):
        module.merge_attn_states = merge_attn_states._merge_attn_states_torch


class _Torch:
    """The `torch` of the GPU worker's module: `torch.device("cuda:N")` is the Nth test device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(what: Any, *more: Any) -> torch.device:
        return torch.device(what.replace("cuda", NAME) if isinstance(what, str) else what, *more)


def _set_faults(self: Any, changes: dict[str, Any]) -> None:
    """For `collective_rpc`: act as `Faults(**changes)` says, once all that was submitted has run."""
    torch.accelerator.synchronize()
    faults.activate(Faults(**changes), rank=self.rank)


def _device_facts(self: Any) -> dict[str, Any]:
    """For `collective_rpc`: what this worker is, where its caches are, and the collectives of each stream.

    Streams are numbered as they were made; 0 is the default stream, on which a model runner computes.
    """
    layers = self.vllm_config.compilation_config.static_forward_context.values()
    caches = [
        layer.kv_cache for layer in layers if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)
    ]
    return {
        "worker": [f"{kind.__module__}.{kind.__name__}" for kind in type(self).__mro__],
        "runner": f"{type(self.model_runner).__module__}.{type(self.model_runner).__name__}",
        "cache_devices": [str(cache.device) for cache in caches],
        "collectives": torch.ops.kvpp_device.collectives(),
    }

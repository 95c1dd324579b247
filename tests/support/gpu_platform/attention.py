"""MLA on the test device: vLLM's kernels for CPUs, each submitted to the current stream. Nothing here waits."""

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

from tests.support.gpu_platform.kernels import launch


class Impl(CPUMLAImpl):
    """The decode kernel is an operator, and is submitted as such; the cache update is torch code that reads slots."""

    def do_kv_cache_update(
        self, latent: Any, key: Any, cache: Any, slots: Any, dtype: str, scale: Any
    ) -> None:
        """Write the new tokens."""
        if cache.numel() == 0:
            return
        stock = super().do_kv_cache_update
        launch(lambda *tensors: stock(*tensors, dtype, None), latent, key, cache, slots)


class Backend(CPUMLABackend):
    """vLLM's MLA backend for CPUs, with the kernels above."""

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM logs."""
        return "KVPPDEV_MLA"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """Return the implementation that vLLM makes for each layer."""
        return Impl


class Prefill(CPUSDPAMLAPrefillBackend):
    """Attention of prompts, whose CPU code reads lengths on the host."""

    def _ragged_sdpa(
        self,
        q: Any,
        k: Any,
        v: Any,
        q_cu_seq_lens: Any,
        kv_cu_seq_lens: Any,
        causal: bool,
        return_softmax_lse: bool,
    ) -> Any:
        out = torch.empty(q.shape[0], q.shape[1], v.shape[-1], dtype=v.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        stock = super()._ragged_sdpa

        def kernel(q: Any, k: Any, v: Any, q_lens: Any, kv_lens: Any, out: Any, lse: Any) -> None:
            found, found_lse = stock(q, k, v, q_lens, kv_lens, causal, True)
            out.copy_(found)
            lse.copy_(found_lse)

        launch(kernel, q, k, v, q_cu_seq_lens, kv_cu_seq_lens, out, lse)
        return (out, lse) if return_softmax_lse else out


def gather_context(
    src_cache: Any,
    dst: Any,
    block_table: Any,
    cu_seq_lens: Any,
    token_to_seq: Any,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Any,
    seq_starts: Any = None,
) -> None:
    """`gather_and_maybe_dequant_cache`: the cached tokens of chunked prompts."""

    def kernel(cache: Any, dst: Any, table: Any, lens: Any, starts: Any) -> None:
        ops.gather_mla_context_cache_cpu(
            src_cache=cache, dst=dst, block_table=table, starts=starts, cu_seq_lens=lens
        )

    launch(kernel, src_cache, dst[:num_tokens], block_table, cu_seq_lens, seq_starts)

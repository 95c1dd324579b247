"""Sparse MLA on the test device: the torch kernels of `sparse_cpu`, each one launch on the current stream.

Nothing here waits, or reads on the host what the device computes. New blocks are zeroed as in tests on the CPU.
"""

import ctypes
from typing import Any

import torch
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import utils

from tests.support import sparse_cpu
from tests.support.gpu_platform.kernels import launch


def register() -> None:
    """Put the kernels in place in the process that loads its plugins."""
    sparse_cpu.register_indexer()
    SparseAttnIndexer.forward_native = index
    # As in `sparse_controls`: the scheduler overlooks that fp8 and fp32 caches are mixed.
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)
    utils._zero_kv_blocks_kernel = Zero()


class Impl(sparse_cpu.SparseImpl):
    """Attention over the tokens that the indexer chose."""

    def do_kv_cache_update(
        self, latent: Any, key: Any, cache: Any, slots: Any, dtype: str, scale: Any
    ) -> None:
        """Write the new tokens."""

        def kernel(*tensors: Any) -> None:
            sparse_cpu.insert(*tensors, packed=dtype == "fp8_ds_mla")

        launch(kernel, latent, key, cache, slots)

    def forward_mqa(
        self, query: Any, cache: Any, metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Return (tokens, heads, latent)."""
        if isinstance(query, tuple):
            query = torch.cat(query, dim=-1)
        out = query.new_empty(*query.shape[:2], sparse_cpu.LATENT)
        scale, packed = self.softmax_scale, self.kv_cache_dtype == "fp8_ds_mla"

        def kernel(out: Any, *tensors: Any) -> None:
            out.copy_(sparse_cpu.attend(*tensors, scale, packed=packed))

        chosen = self.topk_indices_buffer[: len(query)]
        launch(kernel, out, query, chosen, cache, metadata.block_table, metadata.req_id_per_token)
        return out, None


class Backend(sparse_cpu.SparseBackend):
    """The sparse backend of tests on the CPU, with the kernels above."""

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        """Return the implementation that vLLM makes for each layer."""
        return Impl


def index(self: Any, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> torch.Tensor:
    """`SparseAttnIndexer.forward_native`: write the new keys, and choose each token's positions."""
    metadata = sparse_cpu.indexer_metadata(self.k_cache.prefix)
    if metadata is not None:
        topk = self.topk_tokens
        launch(
            lambda *tensors: sparse_cpu.choose(*tensors, topk=topk),
            *(
                self.topk_indices_buffer[: len(hidden_states)],
                self.k_cache.kv_cache,
                k,
                q_quant,
                weights,
            ),
            *(metadata.slot_mapping, metadata.block_table, metadata.query_starts, metadata.seq_lens),
        )
    return self.topk_indices_buffer


class Zero:
    """vLLM's Triton kernel that zeroes blocks: addresses in bytes, strides and sizes in words, and blocks."""

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, addresses: Any, strides: Any, sizes: Any, blocks: Any, **_: Any) -> None:
        launch(_zero, addresses, strides, sizes, blocks)


def _zero(addresses: Any, strides: Any, sizes: Any, blocks: Any) -> None:
    segments = zip(addresses.tolist(), strides.tolist(), sizes.tolist(), strict=True)
    for address, stride, size in segments:
        for block in blocks.tolist():
            ctypes.memset(address + 4 * stride * block, 0, 4 * size)

"""Sparse MLA (DeepSeek-V3.2, GLM-DSA) on vLLM 0.32's CPU build, which has no kernels for it: torch in their place.

Everything around the kernels is vLLM's own: models, cache specs, block tables, slot mappings, scheduling, views. The
two caches have the layout that vLLM's GPU kernels write. With `index_topk` at least the context, outputs are those of
dense MLA, which checks this file.

It has to act in the worker processes, so it comes as a vLLM plugin of the tests' own; `sparse_models.environment` lets
engines find it. Imported in engine processes only.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend, DeepseekV32IndexerMetadata
from vllm.v1.attention.backends.mla.xpu_mla_sparse import XPUMLASparseBackend, XPUMLASparseImpl

BLOCK = 16
FP8_MAX = 448.0
KERNELS = torch.library.Library("vllm", "IMPL")
LATENT, ROPE = 512, 64
TILE = 128  # latent values that share a scale in the packed main cache


def register() -> None:
    """Put the torch kernels of this file, and what controls need, in place in the process that loads its plugins."""
    # It imports vLLM's CPU worker, which has no place on other platforms.
    from tests.support import sparse_controls

    stock = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, **more: Any
    ) -> str:
        if attn_selector_config.use_sparse:
            return f"{__name__}.SparseBackend"
        return stock(cls, selected_backend, attn_selector_config, **more)

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    # As on CUDA and XPU: by vLLM's operator, whose kernel for CPUs is that of this file.
    SparseAttnIndexer.forward_cpu = SparseAttnIndexer.forward_cuda
    KERNELS.impl("sparse_attn_indexer", index, "CPU")
    register_indexer()
    sparse_controls.apply()


def register_indexer() -> None:
    """Put what the indexer needs on any platform in place."""
    DeepseekV32IndexerBackend.get_supported_kernel_block_sizes = staticmethod(lambda spec=None: [BLOCK])
    DeepseekV32IndexerBackend.get_builder_cls = staticmethod(lambda: IndexerBuilder)
    deepseek_v2.per_token_group_quant_fp8 = quantize_queries


# The main cache: a latent and a rotary key a token, as the model's dtype or packed into 656 bytes.


class SparseImpl(XPUMLASparseImpl):
    """Attention over the tokens that the indexer chose."""

    supports_dense_mha_prefill = False

    def record_logical_topk_ready(self) -> None:
        """Tell nobody: there is one stream."""

    def do_kv_cache_update(
        self, latent: Any, key: Any, cache: Any, slots: Any, dtype: str, scale: Any
    ) -> None:
        """Write the new tokens; padding has slot -1."""
        insert(latent, key, cache, slots, packed=dtype == "fp8_ds_mla")

    def forward_mqa(
        self, query: Any, cache: Any, metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Return (tokens, heads, latent): softmax over the chosen positions of each token's own request."""
        if isinstance(query, tuple):
            query = torch.cat(query, dim=-1)
        requests, tables = metadata.req_id_per_token, metadata.block_table
        chosen = self.topk_indices_buffer[: len(query)]
        packed = self.kv_cache_dtype == "fp8_ds_mla"
        return attend(query, chosen, cache, tables, requests, self.softmax_scale, packed=packed), None


def insert(latent: Any, key: Any, cache: Any, slots: Any, *, packed: bool) -> None:
    """Write new tokens into the main cache."""
    slots = slots.flatten()
    kept = slots >= 0
    rows = torch.cat((latent, key.squeeze(1)), dim=-1)[: len(slots)][kept]
    slots = slots[kept]
    cache[slots // BLOCK, slots % BLOCK] = pack(rows) if packed else rows


def attend(
    query: Any, chosen: Any, cache: Any, tables: Any, requests: Any, scale: float, *, packed: bool
) -> torch.Tensor:
    """Return (tokens, heads, latent) of queries (tokens, heads, latent and rotary) over the chosen positions."""
    positions = chosen.clamp(min=0).long()
    blocks = tables[requests.long()].gather(1, positions // BLOCK).long()
    rows = cache[blocks, positions % BLOCK]
    if packed:
        rows = unpack(rows)
    scores = torch.einsum("thd,tkd->thk", query, rows) * scale
    weights = scores.masked_fill((chosen < 0)[:, None], -torch.inf).softmax(-1)
    return torch.einsum("thk,tkd->thd", weights, rows[..., :LATENT])


class SparseBackend(XPUMLASparseBackend):
    """vLLM's plainest sparse backend, whose metadata holds no kernel's schedule, with the kernels above."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8_ds_mla"]

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        """Return the implementation that vLLM makes for each layer."""
        return SparseImpl

    @staticmethod
    def get_supported_kernel_block_sizes(spec: Any = None) -> list[int]:
        """Return the one block size of vLLM's MLA on CPUs."""
        return [BLOCK]


def pack(rows: torch.Tensor) -> torch.Tensor:
    """(tokens, 576) float → (tokens, 656) bytes: 512 fp8 values, 4 fp32 scales, 64 bf16 rotary values."""
    tiles = rows[:, :LATENT].float().unflatten(-1, (LATENT // TILE, TILE))
    scales = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX
    values = (tiles / scales).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    rotary = rows[:, LATENT:].bfloat16().contiguous().view(torch.uint8)
    return torch.cat((values, scales.flatten(1).view(torch.uint8), rotary), dim=-1)


def unpack(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack` up to rounding, for any leading shape."""
    values, scales, rotary = rows.split((LATENT, LATENT // TILE * 4, 2 * ROPE), dim=-1)
    tiles = values.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, TILE))
    latent = (tiles * scales.contiguous().view(torch.float32)[..., None]).flatten(-2)
    return torch.cat((latent, rotary.contiguous().view(torch.bfloat16).float()), dim=-1)


# The indexer: an fp8 key and its scale a token; of a block, first all keys, then all scales.


@dataclass
class IndexerMetadata(DeepseekV32IndexerMetadata):
    """The batch as the torch kernel reads it, a request at a time."""

    query_starts: torch.Tensor = None  # type: ignore[assignment]


class IndexerBuilder(AttentionMetadataBuilder[IndexerMetadata]):
    """Metadata without the schedules that GPU kernels need."""

    def __init__(self, spec: Any, layers: Any, vllm_config: Any, device: Any, **_: Any) -> None:
        super().__init__(spec, layers, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> IndexerMetadata:
        """Keep what vLLM computed of the batch."""
        common = common_attn_metadata
        return IndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            block_table=common.block_table_tensor,
            query_starts=common.query_start_loc,
        )


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and one power-of-two scale a row, as the indexer's kernels round them."""
    largest = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
    return (rows / scale).to(torch.float8_e4m3fn), scale


def quantize_queries(rows: torch.Tensor, group: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's per_token_group_quant_fp8, for rows of one group."""
    return quantize(rows)


def index(
    hidden_states: torch.Tensor,
    k_cache_prefix: Any,
    cache: torch.Tensor,
    q_quant: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    weights: torch.Tensor,
    quant_block_size: int,
    scale_format: str | None,
    topk_tokens: int,
    width: int,
    max_model_len: int,
    total_seq_lens: int,
    chosen: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    """The operator `vllm::sparse_attn_indexer`: write the new keys, and choose each token's positions."""
    metadata = indexer_metadata(_resolve_layer_name(k_cache_prefix))
    if metadata is not None:
        choose(
            *(chosen, cache, k, q_quant, weights),
            *(metadata.slot_mapping, metadata.block_table, metadata.query_starts, metadata.seq_lens),
            topk=topk_tokens,
        )
    return chosen


def indexer_metadata(cache_name: str) -> IndexerMetadata | None:
    """The batch of this forward, for the indexer's cache of that name; None in a profiling run."""
    by_layer = get_forward_context().attn_metadata
    return by_layer[cache_name] if isinstance(by_layer, dict) else None


def choose(
    chosen: Any,
    cache: Any,
    new: Any,
    queries: Any,
    weights: Any,
    slots: Any,
    tables: Any,
    starts: Any,
    lengths: Any,
    *,
    topk: int,
) -> None:
    """Write the new keys into the indexer's cache, and the positions of each token into `chosen`, -1 for none.

    Like kernels that load whole blocks, it masks by adding: a NaN in rows of a block that no token has written
    yet shows in the choice.
    """
    width = new.shape[-1]
    flat = cache.view(len(cache), -1)
    keys = flat[:, : BLOCK * width].view(torch.float8_e4m3fn).unflatten(1, (BLOCK, width))
    scales = flat[:, BLOCK * width :].view(torch.float32)
    _insert(keys, scales, slots, new)
    chosen.fill_(-1)
    starts = starts.tolist()
    bounds = zip(starts, starts[1:], lengths.tolist(), strict=False)
    for request, (start, stop, length) in enumerate(bounds):
        blocks = tables[request, : -(-length // BLOCK)].long()
        history = (keys[blocks].float() * scales[blocks][..., None]).flatten(0, 1)
        scores = torch.einsum("thd,ld->thl", queries[start:stop].float(), history).relu()
        scores = torch.einsum("thl,th->tl", scores, weights[start:stop].float())
        positions = torch.arange(length - (stop - start), length)
        future = torch.arange(len(history)) > positions[:, None]
        scores += torch.zeros(future.shape).masked_fill(future, -torch.inf)
        best = scores.topk(min(topk, len(history)))
        found = best.indices.masked_fill(best.values == -torch.inf, -1)
        chosen[start:stop, : found.shape[1]] = found.to(chosen.dtype)


def _insert(keys: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Write the new tokens' keys; padding has slot -1."""
    kept = slots >= 0
    values, scale = quantize(new[: len(slots)][kept])
    slots = slots[kept]
    keys[slots // BLOCK, slots % BLOCK] = values
    scales[slots // BLOCK, slots % BLOCK] = scale.squeeze(-1)

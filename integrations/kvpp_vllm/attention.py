"""Where the attention classes of vLLM first and last touch a layer's bundle, one entry a class.

A class that is not listed is refused: its cache would be used without waiting for it.
"""

from dataclasses import dataclass
from typing import Any

from kvpp_dag.errors import NotActiveError
from kvpp_vllm.seams import Seam


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Methods of a layer, dotted from the layer itself.

    Entering any of `acquire` may be the first access to a bundle; `acquire_indexer` are those that only a
    layer with an indexer has, and that no compiled model runs: there its operator acquires (`operators`).
    Returning from `release` is the last access. `seams` are checked where a layer uses them.
    """

    acquire: tuple[str, ...]
    release: str
    acquire_indexer: tuple[str, ...] = ()
    seams: tuple[Seam, ...] = ()
    seams_indexer: tuple[Seam, ...] = ()


_FUSED = "vllm.models.deepseek_v32.attention"
_FUSED_ROCM = "vllm.models.deepseek_v32.amd.rocm"

MLA = Attention(
    acquire=("prepare_kv_cache_update",),
    acquire_indexer=("indexer.indexer_op.forward",),
    release="forward_impl",
    # The class's own seams are in the general table, as every model needs them.
    seams_indexer=(
        Seam(
            module="vllm.model_executor.layers.sparse_attn_indexer",
            attribute="SparseAttnIndexer.forward_native",
            parameters=("hidden_states", "q_quant", "k", "weights"),
            use="acquire: its call writes and reads the indexer's cache, before the main cache is used",
        ),
        Seam(
            module="vllm.model_executor.custom_op",
            attribute="CustomOp.forward",
            parameters=("args", "kwargs"),
            use="acquire: the one way into a SparseAttnIndexer, whatever the platform",
        ),
        Seam(
            module="vllm.model_executor.layers.sparse_attn_indexer",
            attribute="sparse_attn_indexer",
            use="acquire in compiled models: the operator vllm::sparse_attn_indexer, between the pieces",
        ),
    ),
)

FUSED = Attention(
    acquire=("impl.prepare_for_batch",),
    release="_sparse_indexer_and_attn",
    seams=(
        Seam(
            module="vllm.v1.attention.backend",
            attribute="AttentionImplBase.prepare_for_batch",
            parameters=("attn_metadata",),
            use="acquire: called right before the kernel that writes both caches",
        ),
        Seam(
            module=_FUSED,
            attribute="DeepseekV32Attention._sparse_indexer_and_attn",
            parameters=(
                "positions",
                "q_c",
                "q_nope",
                "q_pe",
                "index_q_fp8",
                "index_k",
                "index_weights_out",
                "kv_c",
                "k_pe",
                "ql_nope",
                "mqa_q",
                "output",
            ),
            use="release: its return is the last access to both caches",
        ),
    ),
)

FUSED_ROCM = Attention(
    acquire=("_fused_attention",),
    release="_fused_attention",
    seams=(
        Seam(
            module=_FUSED_ROCM,
            attribute="DeepseekV32MLAAttention._fused_attention",
            parameters=(
                "positions",
                "q_c",
                "kv_c",
                "k_pe",
                "index_k",
                "index_weights",
                "output",
            ),
            use="acquire and release: both caches are used inside it alone",
        ),
    ),
)

ATTENTIONS = {
    "vllm.model_executor.layers.attention.mla_attention.MLAAttention": MLA,
    f"{_FUSED}.DeepseekV32Attention": FUSED,
    f"{_FUSED_ROCM}.DeepseekV32MLAAttention": FUSED_ROCM,
}
"""By the class whose `forward` a layer runs: a subclass that keeps it keeps its places as well."""

ATTENTION_SEAMS = tuple(
    seam for entry in ATTENTIONS.values() for seam in (*entry.seams, *entry.seams_indexer)
)
"""All seams of this table, for checks that do not depend on a model."""


def attention_of(layer: Any, name: str) -> Attention:
    """The entry of a layer. Raises NotActiveError for a class without one, naming layer and class."""
    forward = next((c for c in type(layer).__mro__ if "forward" in vars(c)), type(layer))
    running = f"{forward.__module__}.{forward.__qualname__}"
    if running not in ATTENTIONS:
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: layer {name!r} runs {running}.forward, and this "
            f"version knows where {', '.join(ATTENTIONS)} use their caches; its cache would be used "
            "without waiting for it. Run this model with enable_kvpp off."
        )
    return ATTENTIONS[running]

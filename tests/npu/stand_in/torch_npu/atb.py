"""torch_npu.atb: reading pages of a cache."""

from torch import Tensor

from torch_npu._mla import npu_gather_pa_kv_cache


def npu_paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    key: Tensor,
    value: Tensor,
) -> None:
    """Copy each request's pages, one request behind the other, into `key` and `value`."""
    npu_gather_pa_kv_cache(
        key_cache, value_cache, block_table, context_lens, key, value, seq_offset=seq_starts
    )

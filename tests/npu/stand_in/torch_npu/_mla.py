"""Dense MLA: pages of the cache are [blocks, block, 1, width], one tensor for the latent and one for the rope part."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_npu._registry import operator, python
from torch_npu._small import interleaved_rope, rms


@operator(
    "_kv_rmsnorm_rope(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, int latent, float epsilon)"
    " -> (Tensor, Tensor)",
    meta=True,
)
def _kv_rmsnorm_rope(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, latent: int, epsilon: float
) -> tuple[Tensor, Tensor]:
    rope = interleaved_rope(kv[..., latent:], cos, sin).to(kv.dtype)
    return rope, rms(kv[..., :latent], gamma, epsilon)[0]


@operator("_write_pages(Tensor(a!) pages, Tensor slots, Tensor rows) -> ()")
def _write_pages(pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Rows with a negative slot are left out."""
    slots = slots.view(-1).long()
    kept = slots >= 0
    block, offset = slots[kept] // pages.shape[1], slots[kept] % pages.shape[1]
    pages[block, offset, 0] = rows.reshape(-1, pages.shape[-1])[kept].to(pages.dtype)


@python
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    c_kv_scale: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """kv [tokens, 1, 1, latent + rope]; index [tokens] are slots."""
    if cache_mode != "PA" or c_kv_scale is not None:
        raise NotImplementedError("the stand-in torch_npu writes pages that are not quantised alone")
    rope, latent = _kv_rmsnorm_rope(kv, gamma, cos, sin, ckv_cache.shape[-1], epsilon)
    _write_pages(ckv_cache, index, latent)
    _write_pages(k_cache, index, rope)
    return k_cache, ckv_cache, rope, latent


@operator(
    "_transpose_batchmatmul(Tensor x, Tensor weight, int[] perm_x1, int[] perm_x2, int[] perm_y) -> Tensor",
    meta=True,
)
def _transpose_batchmatmul(
    x: Tensor, weight: Tensor, perm_x1: list[int], perm_x2: list[int], perm_y: list[int]
) -> Tensor:
    product = x.permute(perm_x1).float() @ weight.permute(perm_x2).float()
    return product.permute(perm_y).contiguous().to(x.dtype)


@python
def npu_transpose_batchmatmul(
    x: Tensor,
    weight: Tensor,
    *,
    perm_x1: Any = (0, 1, 2),
    perm_x2: Any = (0, 1, 2),
    perm_y: Any = (1, 0, 2),
) -> Tensor:
    return _transpose_batchmatmul(x, weight, perm_x1, perm_x2, perm_y)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """q [queries, heads, D], k and v [keys, heads, D or Dv]: results, and logarithms of the sums of exponentials.

    A causal mask lets the last query see every key.
    """
    scores = torch.einsum("qhd,khd->qhk", q.float(), k.float()) * scale
    if causal:
        ahead = torch.arange(len(k))[None] > torch.arange(len(q))[:, None] + (len(k) - len(q))
        scores.masked_fill_(ahead[:, None], float("-inf"))
    sums = torch.logsumexp(scores, -1)
    shares = torch.exp(scores - sums[..., None]).nan_to_num(0.0)
    return torch.einsum("qhk,khd->qhd", shares, v.float()), sums


_FLAT = (
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None,"
    " Tensor? key_rope=None, int num_heads=1, int num_key_value_heads=0, float scale=1.0, str input_layout='BSH',"
    " Tensor? atten_mask=None, int sparse_mode=0, int[]? actual_seq_lengths=None,"
    " int[]? actual_seq_lengths_kv=None, Tensor? block_table=None, int block_size=0, bool softmax_lse_flag=False,"
    " int antiquant_mode=0, Tensor? antiquant_scale=None) -> (Tensor, Tensor)"
)


def _flat_shapes(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    heads = named["num_heads"]
    out = query.new_empty(query.shape[0], heads, value.shape[-1])
    return out, out.new_empty(query.shape[0], heads, 1, dtype=torch.float32)


@operator(_FLAT, shapes=_flat_shapes)
def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, **named: Any
) -> tuple[Tensor, Tensor]:
    """Tokens of all requests in a row, without pages; lengths are running totals of queries and of keys."""
    heads = named["num_heads"]
    if (named["input_layout"], named["num_key_value_heads"]) != ("TND", heads) or named[
        "block_table"
    ] is not None:
        raise NotImplementedError(f"the stand-in torch_npu has no attention of {named['input_layout']}")
    if named["query_rope"] is not None:
        query = torch.cat((query, named["query_rope"]), -1)
        key = torch.cat((key, named["key_rope"]), -1)
    out = torch.zeros(len(query), heads, value.shape[-1])
    sums = torch.full((len(query), heads), float("-inf"))
    first_query = first_key = 0
    for queries, keys in zip(named["actual_seq_lengths"], named["actual_seq_lengths_kv"], strict=True):
        if keys > first_key:
            rows, columns = slice(first_query, queries), slice(first_key, keys)
            causal = named["sparse_mode"] == 3
            out[rows], sums[rows] = _attend(
                query[rows], key[columns], value[columns], named["scale"], causal=causal
            )
        first_query, first_key = queries, keys
    return out.to(query.dtype), sums.unsqueeze(-1)


_PAGED = (
    "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None,"
    " Tensor? key_rope=None, int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0,"
    " str input_layout='BSH', Tensor? atten_mask=None, int sparse_mode=0, int[]? actual_seq_qlen=None,"
    " int[]? actual_seq_kvlen=None, Tensor? block_table=None, int block_size=0, bool return_softmax_lse=False)"
    " -> (Tensor, Tensor)"
)


def _paged_shapes(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    between = [] if named["input_layout"] == "TND_NTD" else [1]
    shape = [named["num_query_heads"], query.shape[0], *between, value.shape[-1]]
    return query.new_empty(shape), query.new_empty(0, dtype=torch.float32)


def _queries(query: Tensor, named: dict[str, Any]) -> tuple[Tensor, list[int]]:
    """[queries, heads, D], and where each request's end."""
    layout = named["input_layout"]
    if layout == "TND_NTD":
        return query, named["actual_seq_qlen"]
    if layout not in ("BNSD_NBSD", "BSND_NBSD"):
        raise NotImplementedError(f"the stand-in torch_npu has no paged attention of {layout}")
    return query[:, :, 0] if layout == "BNSD_NBSD" else query[:, 0], list(range(1, len(query) + 1))


@operator(_PAGED, shapes=_paged_shapes)
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, **named: Any
) -> tuple[Tensor, Tensor]:
    """Pages [blocks, 1, block, D] of one head; results [heads, queries, (1,) D]."""
    tokens, ends = _queries(torch.cat((query, named["query_rope"]), -1), named)
    heads = named["num_query_heads"]
    out = torch.zeros(len(tokens), heads, value.shape[-1])
    rope, size, first = named["key_rope"], key.shape[2], 0
    for table, end, count in zip(named["block_table"], ends, named["actual_seq_kvlen"], strict=False):
        if count > 0 and end > first:
            place = torch.arange(count)
            block, offset = table.long()[place // size], place % size
            latent = value[block, :, offset]
            keys = torch.cat((key[block, :, offset], rope[block, :, offset]), -1)
            causal = named["sparse_mode"] == 3
            out[first:end], _ = _attend(
                tokens[first:end],
                keys.expand(-1, heads, -1),
                latent.expand(-1, heads, -1),
                named["softmax_scale"],
                causal=causal,
            )
        first = end
    result = out.to(query.dtype).transpose(0, 1).contiguous()
    if named["input_layout"] != "TND_NTD":
        result = result.unsqueeze(2)
    return result, torch.empty(0)


@operator("_merge_attention(Tensor[] sums, Tensor[] outs) -> Tensor")
def _merge_attention(sums: list[Tensor], outs: list[Tensor]) -> Tensor:
    """Attention over all keys from attention over parts of them: sums [n], outs [n, D]."""
    each = torch.stack(list(sums)).float()
    shares = torch.exp(each - torch.logsumexp(each, 0)).nan_to_num(0.0)
    return (torch.stack(list(outs)).float() * shares[..., None]).sum(0).to(outs[0].dtype)


@python
def npu_attention_update(lse: Any, local_out: Any, update_type: int) -> tuple[Tensor, None]:
    return _merge_attention(list(lse), list(local_out)), None


@operator(
    "_load_pages(Tensor latent_pages, Tensor rope_pages, Tensor table, Tensor lengths, Tensor starts,"
    " Tensor(a!) latent, Tensor(b!) rope) -> ()"
)
def _load_pages(
    latent_pages: Tensor,
    rope_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    latent: Tensor,
    rope: Tensor,
) -> None:
    """Copy `lengths` tokens from `starts` on of each request, one request behind the other."""
    size = latent_pages.shape[1]
    for blocks, start, end, place in _spans(table, lengths, starts):
        token = torch.arange(start, end)
        block = blocks.long()[token // size]
        target = slice(place, place + end - start)
        latent[target] = latent_pages[block, token % size]
        rope[target] = rope_pages[block, token % size]


def _spans(table: Tensor, lengths: Tensor, starts: Tensor) -> Iterator[tuple[Tensor, int, int, int]]:
    place = 0
    for blocks, length, start in zip(table, lengths.tolist(), starts.tolist(), strict=False):
        yield blocks, start, start + length, place
        place += length


@python
def npu_gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    if is_seq_lens_cumsum:
        raise NotImplementedError("the stand-in torch_npu gathers pages by lengths alone")
    starts = torch.zeros_like(seq_lens) if seq_offset is None else seq_offset
    _load_pages(key_cache, value_cache, block_tables, seq_lens, starts, key, value)

"""Sparse attention: DeepSeek-V3.2's indexer, and attention over what it has chosen; quantised caches as well."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_npu._registry import operator

TOPK = int(os.environ.get("KVPP_TEST_NPU_TOPK", "2048"))
"""Keys that a query may choose: vllm-ascend always asks for 2048, and a test for fewer than there are."""

_LENGTHS = "Tensor? actual_seq_lengths_query=None, Tensor? {keys}=None, Tensor? block_table=None"
_ORDER = "int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807"


@operator("npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)")
def npu_scatter_nd_update_(target: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Rows of target [M, D] at indices [T, 1]; negative ones are left out."""
    rows = indices.view(-1).long()
    kept = rows >= 0
    target[rows[kept]] = updates[kept].to(target.dtype)
    return target


def _requests(query_ends: Tensor, key_counts: Tensor) -> Iterator[tuple[int, slice, int]]:
    """Number, queries and count of keys of every request that has both."""
    first = 0
    for number, (end, keys) in enumerate(zip(query_ends.tolist(), key_counts.tolist(), strict=False)):
        if end > first and keys > 0:
            yield number, slice(first, end), keys
        first = end


def gathered(pages: Tensor, table: Tensor, count: int) -> Tensor:
    """The first `count` rows of a request: pages [blocks, block, 1, D] → [count, D]."""
    place = torch.arange(count)
    return pages[table.long()[place // pages.shape[1]], place % pages.shape[1], 0]


def _choice(query: Tensor, **named: Any) -> Tensor:
    return query.new_empty(query.shape[0], 1, named["sparse_count"], dtype=torch.int32)


def _choose(
    query: Tensor, named: dict[str, Any], scores_of: Callable[[int, slice, int], Tensor]
) -> Tensor:
    """The best keys of each query, of those not ahead of it; -1 behind the last."""
    layouts = (named["layout_query"], named["layout_key"], named["sparse_mode"])
    if layouts != ("TND", "PA_BSND", 3):
        raise NotImplementedError(f"the stand-in torch_npu has no indexer of {layouts}")
    count = named["sparse_count"]
    out = torch.full((len(query), 1, count), -1, dtype=torch.int32)
    ends, keys = named["actual_seq_lengths_query"], named["actual_seq_lengths_key"]
    for number, rows, known in _requests(ends, keys):
        queries = rows.stop - rows.start
        ahead = torch.arange(known)[None] > torch.arange(queries)[:, None] + (known - queries)
        scores = scores_of(number, rows, known).masked_fill(ahead, float("-inf"))
        best = scores.topk(min(count, TOPK, known), -1)
        out[rows, 0, : best.indices.shape[1]] = torch.where(
            best.values > float("-inf"), best.indices, -1
        ).int()
    return out


def _scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    return (torch.einsum("qhd,kd->qhk", query, keys).relu() * weights[:, :, None]).sum(1)


_INDEXER = (
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, "
    + _LENGTHS.format(keys="actual_seq_lengths_key")
    + ", str layout_query='BSND', str layout_key='BSND', int sparse_count=2048, "
    + _ORDER
    + ", bool return_value=False) -> (Tensor, Tensor)"
)


def _index_shapes(query: Tensor, key: Tensor, weights: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    return _choice(query, **named), query.new_empty(0, dtype=torch.float32)


def _index(query: Tensor, key: Tensor, weights: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    """query [T, heads, D], pages of keys [blocks, block, 1, D], weights [T, heads]."""
    wide, shares, table = query.float(), weights.float(), named["block_table"]

    def scores(number: int, rows: slice, count: int) -> Tensor:
        return _scores(wide[rows], gathered(key, table[number], count).float(), shares[rows])

    return _choose(query, named, scores), torch.empty(0)


for _space in ("npu", "_C_ascend"):
    operator(_INDEXER, space=_space, shapes=_index_shapes)(_index)

_INDEXER_QUANT = (
    "npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale,"
    " Tensor key_dequant_scale, *, "
    + _LENGTHS.format(keys="actual_seq_lengths_key")
    + ", int query_quant_mode=0, int key_quant_mode=0, str layout_query='BSND', str layout_key='BSND',"
    " int sparse_count=2048, " + _ORDER + ") -> Tensor"
)


def _index_quant_shapes(query: Tensor, *_: Tensor, **named: Any) -> Tensor:
    return _choice(query, **named)


@operator(_INDEXER_QUANT, space="_C_ascend", shapes=_index_quant_shapes)
def npu_lightning_indexer_quant(
    query: Tensor, key: Tensor, weights: Tensor, query_scale: Tensor, key_scale: Tensor, **named: Any
) -> Tensor:
    """The same with int8 queries and keys; scales [T, heads] and [blocks, block, 1]."""
    wide, shares, table = (
        query.float() * query_scale.float()[..., None],
        weights.float(),
        named["block_table"],
    )
    scales = key_scale.unsqueeze(2)

    def scores(number: int, rows: slice, count: int) -> Tensor:
        keys = (
            gathered(key, table[number], count).float() * gathered(scales, table[number], count).float()
        )
        return _scores(wide[rows], keys, shares[rows])

    return _choose(query, named, scores)


def _attend_chosen(
    query: Tensor,
    named: dict[str, Any],
    chosen: Tensor,
    keys_of: Callable[[int, int], tuple[Tensor, Tensor]],
) -> Tensor:
    """query [T, heads, latent + rope]; `keys_of` gives latent [n, D] and rope parts; result [T, heads, latent]."""
    out = None
    ends, counts = named["actual_seq_lengths_query"], named["actual_seq_lengths_kv"]
    for number, rows, count in _requests(ends, counts):
        latent, rope = keys_of(number, count)
        keys = torch.cat((latent, rope), -1)
        if out is None:
            out = torch.zeros(*query.shape[:2], latent.shape[-1])
        for row in range(rows.start, rows.stop):
            places = chosen[row, 0].long()
            places = places[places >= 0]
            shares = (query[row] @ keys[places].T * named["scale_value"]).softmax(-1)
            out[row] = shares @ latent[places]
    if out is None:
        raise NotImplementedError("the stand-in torch_npu attends to no key at all")
    return out


_ATTENTION = (
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, "
    + _LENGTHS.format(keys="actual_seq_lengths_kv")
    + ", Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND',"
    " str layout_kv='BSND', "
    + _ORDER
    + ", int attention_mode=2, bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)"
)


def _attention_shapes(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    nothing = query.new_empty(0, dtype=torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), nothing, nothing.clone()


@operator(_ATTENTION, space="_C_ascend", shapes=_attention_shapes)
def npu_sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """query [T, heads, latent], query_rope [T, heads, rope]; pages [blocks, block, 1, D]; indices [T, 1, count]."""
    wide = torch.cat((query, named["query_rope"]), -1).float()
    rope, table = named["key_rope"], named["block_table"]

    def keys(number: int, count: int) -> tuple[Tensor, Tensor]:
        return gathered(key, table[number], count).float(), gathered(rope, table[number], count).float()

    out = _attend_chosen(wide, named | {"scale_value": scale_value}, sparse_indices, keys)
    return out.to(query.dtype), torch.empty(0), torch.empty(0)


_ATTENTION_QUANT = (
    "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices,"
    " float scale_value, *, int key_quant_mode=1, int value_quant_mode=1, "
    + _LENGTHS.format(keys="actual_seq_lengths_kv")
    + ", int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', "
    + _ORDER
    + ", int attention_mode=2, int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64,"
    " bool return_softmax_lse=False) -> (Tensor, Tensor, Tensor)"
)


def _attention_quant_shapes(query: Tensor, *_: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    nothing = query.new_empty(0, dtype=torch.float32)
    return (
        query.new_empty(*query.shape[:2], query.shape[-1] - named["rope_head_dim"]),
        nothing,
        nothing.clone(),
    )


@operator(_ATTENTION_QUANT, space="_C_ascend", shapes=_attention_quant_shapes)
def npu_kv_quant_sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of rows of bytes: int8 latent, the rope part as the queries are, a float32 scale a tile of the latent."""
    rope_width, table = named["rope_head_dim"], named["block_table"]
    latent = query.shape[-1] - rope_width
    end = latent + rope_width * query.element_size()

    def keys(number: int, count: int) -> tuple[Tensor, Tensor]:
        rows = gathered(key, table[number], count).contiguous()
        rope = rows[:, latent:end].contiguous().view(query.dtype).float()
        scales = rows[:, end:].contiguous().view(torch.float32)
        values = rows[:, :latent].float().unflatten(-1, (-1, named["tile_size"])) * scales[..., None]
        return values.flatten(-2), rope

    out = _attend_chosen(query.float(), named | {"scale_value": scale_value}, sparse_indices, keys)
    return out.to(query.dtype), torch.empty(0), torch.empty(0)

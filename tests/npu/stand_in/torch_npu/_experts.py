"""Routed experts that are not quantised."""

from typing import Any

import torch
from torch import Tensor

from torch_npu._registry import operator, python

_GATE = (
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm,"
    " int norm_type, bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None)"
    " -> (Tensor, Tensor, Tensor)"
)


@operator(_GATE, space="_C_ascend", meta=True)
def moe_gating_top_k(
    x: Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [tokens, experts]: weights and ids [tokens, k]. A group is worth its two best experts, or its best."""
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    worth = scores if bias_opt is None else scores + bias_opt.float()
    if group_count > 1:
        groups = worth.unflatten(-1, (group_count, -1))
        best = groups.topk(2, -1).values.sum(-1) if group_select_mode == 1 else groups.amax(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(k_group, -1).indices, 1.0).bool()
        worth = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = worth.topk(k, -1).indices
    weights = scores.gather(1, ids)
    if renorm == 1 or norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), ids.int(), scores


_ROUTE = (
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None,"
    " int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0,"
    " int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, int quant_mode=0,"
    " int[2] active_expert_range=[], int row_idx_type=0) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _route_shapes(x: Tensor, expert_idx: Tensor, **named: Any) -> tuple[Tensor, ...]:
    count, (first, end) = expert_idx.numel(), named["active_expert_range"]
    return (
        x.new_empty(count, x.shape[1]),
        x.new_empty(count, dtype=torch.int32),
        x.new_empty(end - first, dtype=torch.int64),
        x.new_empty(0, dtype=torch.float32),
    )


@operator(_ROUTE, space="_C_ascend", shapes=_route_shapes)
def npu_moe_init_routing_custom(x: Tensor, expert_idx: Tensor, **named: Any) -> tuple[Tensor, ...]:
    """Rows in the order of the experts that live here, where each choice's row went (-1 if nowhere), and counts."""
    if (named["quant_mode"], named["expert_tokens_num_type"]) != (-1, 1):
        raise NotImplementedError("the stand-in torch_npu routes tokens that are not quantised alone")
    first, end = named["active_expert_range"]
    choices = expert_idx.flatten().long()
    here = (choices >= first) & (choices < end)
    order = torch.argsort(torch.where(here, choices, named["expert_num"]), stable=True)[
        : int(here.sum())
    ]
    rows = torch.zeros(len(choices), x.shape[1], dtype=x.dtype)
    rows[: len(order)] = x[order // expert_idx.shape[1]]
    places = torch.full((len(choices),), -1, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32)
    return rows, places, torch.bincount(choices[here] - first, minlength=end - first), torch.empty(0)


def _product_shape(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[-1])


@operator("_grouped_matmul(Tensor x, Tensor weight, Tensor counts) -> Tensor", shapes=_product_shape)
def _grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [rows, in], weight [experts, in, out]; the first counts[0] rows are the first expert's, and so on."""
    out = torch.zeros(len(x), weight.shape[-1], dtype=x.dtype)
    first = 0
    for expert, count in enumerate(counts.tolist()):
        rows = slice(first, first + count)
        out[rows] = x[rows] @ weight[expert]
        first += count
    return out


@python
def npu_grouped_matmul(
    x: Any,
    weight: Any,
    *,
    bias: Any = None,
    split_item: int = 0,
    group_list_type: int = 0,
    group_type: int = -1,
    group_list: Any = None,
) -> list[Tensor]:
    if (group_list_type, group_type, split_item, bias) != (1, 0, 2, None):
        raise NotImplementedError(
            "the stand-in torch_npu multiplies rows by counts alone, without a bias"
        )
    return [_grouped_matmul(x[0], weight[0], group_list)]


@operator("_unpermute(Tensor rows, Tensor places, Tensor weights) -> Tensor", meta=True)
def _unpermute(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    chosen = rows[places.long()].unflatten(0, weights.shape)
    return (chosen.float() * weights.float()[..., None]).sum(1).to(rows.dtype)


@python
def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor) -> Tensor:
    return _unpermute(permuted_tokens, sorted_indices, probs)

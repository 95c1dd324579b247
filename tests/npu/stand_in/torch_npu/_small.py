"""Norms, rotary embeddings, activations and sampling."""

from typing import Any

import torch
from torch import Tensor

from torch_npu._registry import operator, python


@python
def npu_format_cast(x: Tensor, acl_format: int, *_: Any, **__: Any) -> Tensor:
    """Memory has one format here."""
    return x


@python
def get_npu_format(x: Tensor) -> int:
    return 2


@python
def npu_prefetch(*_: Any, **__: Any) -> None:
    pass


@python
def _npu_matmul_add_fp32(x: Tensor, weight: Tensor, c: Tensor) -> Tensor:
    """Called once, to warm up, with a result that nobody reads."""
    return c


def rms(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * factor * gamma.float()).to(x.dtype), factor


@operator("npu_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor, Tensor)", meta=True)
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return rms(x, gamma, epsilon)


@operator(
    "npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-6) -> (Tensor, Tensor, Tensor)",
    meta=True,
)
def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Any:
    total = x1 + x2
    return (*rms(total, gamma, epsilon), total)


@operator(
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6)"
    " -> (Tensor, Tensor, Tensor)",
    space="_C_ascend",
    meta=True,
)
def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> Any:
    total = x1 + x2
    normal, factor = rms(total, gamma, epsilon)
    return (normal if beta is None else normal + beta), factor, total


@operator("npu_swiglu(Tensor x, int dim=-1) -> Tensor", meta=True)
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def interleaved_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs side by side come out as halves; float32."""
    halves = x.float().unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves * cos.float() + _turned(halves) * sin.float()


@operator("npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor", meta=True)
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, N, S, D]; cos and sin [B, 1, S or 1, D]."""
    return interleaved_rope(x, cos, sin).to(x.dtype)


@operator(
    "npu_rotary_mul(Tensor x, Tensor cos, Tensor sin, str rotary_mode='half') -> Tensor", meta=True
)
def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half") -> Tensor:
    wide = x.float()
    pairs = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    other = _turned(wide) if rotary_mode == "half" else pairs
    return (wide * cos.float() + other * sin.float()).to(x.dtype)


@operator(
    "_npu_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size,"
    " Tensor cos_sin_cache, bool is_neox) -> ()"
)
def _npu_rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """query and key [tokens, heads * head_size]."""
    cos, sin = (half[:, None] for half in cos_sin_cache[positions.long()].float().chunk(2, -1))
    for x in (query, key):
        heads = x.reshape(x.shape[0], -1, head_size).float()
        first, second = heads.chunk(2, -1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        parts = (first * cos - second * sin, second * cos + first * sin)
        x.copy_(
            (torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)).reshape(x.shape)
        )


@operator("npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor", meta=True)
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    ascending, places = logits.sort(-1)
    if k is not None:
        smallest = ascending.gather(1, (ascending.shape[1] - k.long())[:, None].clamp(min=0))
        ascending = ascending.masked_fill(ascending < smallest, float("-inf"))
    if p is not None:
        out = ascending.softmax(-1).cumsum(-1) <= 1 - p[:, None]
        out[:, -1] = False
        ascending = ascending.masked_fill(out, float("-inf"))
    return logits.scatter(1, places, ascending)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Along the last dimension: int8 and float32 scales."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=1e-10) / 127
    return (wide / scale[..., None]).round().clamp(-128, 127).to(torch.int8), scale


@operator("_quantize_rows(Tensor x) -> (Tensor, Tensor)", meta=True)
def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return _quantized(x)


@python
def npu_dynamic_quant(
    x: Tensor, *, smooth_scales: Any = None, dst_type: Any = torch.int8, **_: Any
) -> Any:
    if dst_type != torch.int8 or smooth_scales is not None:
        raise NotImplementedError(
            "the stand-in torch_npu quantises to int8 alone, without smooth scales"
        )
    return _quantize_rows(x)


@operator("_quantize_tiles(Tensor x, int width) -> (Tensor, Tensor)", meta=True)
def _quantize_tiles(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    values, scales = _quantized(x.unflatten(-1, (-1, width)))
    return values.flatten(-2), scales


@python
def npu_dynamic_block_quant(
    x: Tensor, *, dst_type: Any = 1, row_block_size: int = 1, col_block_size: int = 128, **_: Any
) -> Any:
    """x [T, 1, D]; int8 [T, 1, D] and scales [T, 1, D / col_block_size]."""
    if dst_type != 1 or row_block_size != 1:
        raise NotImplementedError("the stand-in torch_npu quantises tiles of a row to int8 alone")
    return _quantize_tiles(x, col_block_size)


@operator("get_physical_device_id(int device) -> int", space="_C_ascend")
def get_physical_device_id(device: int) -> int:
    return device


# Looked up where vllm-ascend's own operators are found, and never called.


@operator("device_print(str text) -> ()", space="_C_ascend")
def device_print(text: str) -> None:
    raise NotImplementedError("the stand-in torch_npu prints nothing from the device")


@operator("device_print_tensor(Tensor value) -> ()", space="_C_ascend")
def device_print_tensor(value: Tensor) -> None:
    raise NotImplementedError("the stand-in torch_npu prints nothing from the device")

"""Triton kernels on the paths used here, as operators; a plugin of vLLM puts them in place before a worker is made."""

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_npu._registry import operator

LIBRARY = "vllm_ascend.vllm_ascend_C"
"""vllm-ascend's own library, whose operators are the stand-in's."""


@operator(
    "_slot_mapping(int tokens, int most, Tensor query_starts, Tensor positions, Tensor table, int block_size,"
    " int pad, Tensor(a!) slots) -> ()"
)
def _slot_mapping(
    tokens: int,
    most: int,
    query_starts: Tensor,
    positions: Tensor,
    table: Tensor,
    block_size: int,
    pad: int,
    slots: Tensor,
) -> None:
    starts = query_starts.tolist()
    for request, (first, end) in enumerate(pairwise(starts)):
        place = positions[first:end].long()
        slots[first:end] = table[request].long()[place // block_size] * block_size + place % block_size
    slots[tokens:most] = pad


class _Kernel:
    """Called as a Triton kernel is: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def slot_mapping(
    tokens: int,
    most: int,
    query_starts: Tensor,
    positions: Tensor,
    table: Tensor,
    stride: int,
    block_size: int,
    slots: Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,  # noqa: N803 - a constant of the kernel
    PAD_ID: int,  # noqa: N803
    **_: Any,
) -> None:
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError("the stand-in torch_npu maps slots without context parallelism alone")
    torch.ops.npu._slot_mapping(tokens, most, query_starts, positions, table, block_size, PAD_ID, slots)


def register() -> None:
    """Put the kernels in place; vLLM calls this in every process that it starts."""
    import vllm.v1.worker.block_table as stock

    if (
        os.environ["VLLM_VERSION"] == "0.30.0"
    ):  # imports its library of operators where it first calls one
        sys.modules.setdefault(LIBRARY, ModuleType(LIBRARY))
    stock._compute_slot_mapping_kernel = _Kernel(slot_mapping)
    ascend = sys.modules.get("vllm_ascend.worker.block_table")
    if ascend is not None:
        ascend._compute_slot_mapping_kernel = stock._compute_slot_mapping_kernel

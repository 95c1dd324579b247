"""A stand-in for torch_npu where there is no NPU: the project's test device under the name `npu`.

The device, its streams and its memory are `tests/device`; HCCL is that device's collectives over gloo; the operators
that vllm-ascend calls are written in torch, for host tensors, and run on the device's streams. What an operator
computes is known from how vllm-ascend calls it: numbers of an NPU are not reproduced.
"""

import enum
import functools
import sys
from typing import Any

import torch

from torch_npu import _device

__version__ = "2.10.0.post4"

_device.load()

from torch_npu import npu  # noqa: E402 - there is no device before

_device.register(npu)
sys.modules["torch.npu"] = npu

from torch_npu import _C, _experts, _mla, _small, _sparse, atb, profiler  # noqa: E402, F401
from torch_npu._registry import OPERATORS  # noqa: E402


class Format(enum.IntEnum):
    ND = 2
    FRACTAL_NZ = 29


# Names of data types that vllm-ascend mentions, and no path here uses.
float4_e2m1fn_x2 = "float4_e2m1fn_x2"
hifloat8 = "hifloat8"
float8_e8m0fnu = torch.float8_e8m0fnu


def __getattr__(name: str) -> Any:
    if name in OPERATORS:
        return OPERATORS[name]
    if name.startswith(("npu_", "_npu_")):  # imported by name on paths that never call it
        return functools.partial(missing, name)
    raise AttributeError(f"the stand-in torch_npu has no {name}")


def missing(name: str, *_: Any, **__: Any) -> None:
    raise NotImplementedError(f"the stand-in torch_npu has no operator {name}")


def _autoload() -> None:
    """The entry point by which torch imports this package; importing it is all there is to do."""

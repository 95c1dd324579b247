"""Makes torch know the test device as `npu`, with its collectives as `hccl`."""

import atexit
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.device.build import finish, load_native

LIBRARY = "KVPP_TEST_NPU_LIBRARY"
"""The variable that names the compiled device; see `tests/npu/engine.py`."""

_native: list[Any] = []
_kept: list[Any] = []


def load() -> None:
    """Load the device. Starts no thread, so that the process can still fork."""
    _native.append(load_native(Path(os.environ[LIBRARY])))
    atexit.register(finish)
    torch.utils.rename_privateuse1_backend("npu")


def register(module: ModuleType) -> None:
    """Make `module` torch.npu, and name what vllm-ascend expects torch_npu to have put into torch."""
    torch._register_device_module("npu", module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    torch.version.cann = "8.5.0"
    torch.distributed.is_hccl_available = lambda: True
    dist.Backend.register_backend("hccl", _collectives, devices=["npu"])
    torch._C._distributed_c10d.Backend.get_hccl_comm_name = _communicator_name
    _name_operators_of_torchvision()


def _communicator_name(backend: Any, rank: int) -> str:
    """What fused operators of experts would be given; none runs here."""
    return f"stand-in {rank}"


def _name_operators_of_torchvision() -> None:
    """Models that vllm-ascend patches import torchvision, whose library cannot load beside a CPU build of torch."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def native() -> Any:
    """The extension module of the test device: see `tests/device/cpp/module.cpp`."""
    return _native[0]


def _collectives(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
    return native().make_collectives(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)

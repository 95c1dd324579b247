"""What is particular to a vendor of accelerators: all of it, in one table."""

import importlib
import importlib.util
from dataclasses import dataclass

import torch

from kvpp_dag.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """`collectives` is the torch.distributed backend; `package` makes torch know the device type."""

    collectives: str
    package: str | None = None


VENDORS = {
    "cuda": Vendor(collectives="nccl"),
    "npu": Vendor(collectives="hccl", package="torch_npu"),
    "xpu": Vendor(collectives="xccl"),
}
"""By torch device type; ROCm's is `cuda` too, which is refused: see `nccl`."""


def group_backend(device_type: str) -> str:
    """The backend of a KVPP group: collectives of the device, and gloo for what the hosts compare.

    Raises ConfigError for a device type that is neither `cpu` nor in the table.
    """
    if device_type == "cpu":
        return "gloo"
    if device_type not in VENDORS:
        raise ConfigError(
            f"KVPP does not know how to send between devices of type {device_type!r}; it knows "
            f"cpu, {', '.join(VENDORS)}."
        )
    return f"cpu:gloo,{device_type}:{VENDORS[device_type].collectives}"


def uses_nccl(device_type: str) -> bool:
    """Whether collectives between devices of that type are NCCL's."""
    return device_type in VENDORS and VENDORS[device_type].collectives == "nccl"


def find_accelerator() -> torch.device | None:
    """The accelerator that torch can use on this machine, or None."""
    for vendor in VENDORS.values():
        if vendor.package is not None and importlib.util.find_spec(vendor.package) is not None:
            importlib.import_module(vendor.package)
    return torch.accelerator.current_accelerator(check_available=True)

"""Python functions as kernels of the test device."""

from collections.abc import Callable
from typing import Any

import torch

from tests.device.build import NAME, launch_on_test_device


def launch(function: Callable[..., object], *arguments: Any) -> None:
    """Submit `function` to the current stream, with CPU tensors over the memory of device tensors.

    What is on the host is read now, as a kernel's arguments are.
    """
    kept = [on_host(argument) for argument in arguments]
    launch_on_test_device(lambda: function(*kept))


def on_host(value: Any) -> Any:
    """`value` as a kernel sees it, tuples of tensors included."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(map(on_host, value))
    if isinstance(value, torch.Tensor):
        return torch.ops.kvpp_device.host(value) if value.device.type == NAME else value.clone()
    return value

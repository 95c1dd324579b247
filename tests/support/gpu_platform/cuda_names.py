"""Names of torch.cuda that vLLM's model runners use, mapped to torch's generic ones, as vLLM does for other GPUs."""

import contextlib
from typing import Any

import torch

from tests.device.build import NAME


def map_cuda_names() -> None:
    """Streams and events of torch.cuda are the test device's from here on."""
    cuda: Any = torch.cuda
    cuda.Stream = _Stream
    cuda.Event = _event
    cuda.current_stream = lambda device=None: torch.accelerator.current_stream()
    cuda.default_stream = lambda device=None: torch.accelerator.current_stream()
    cuda.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    cuda.set_stream = torch.accelerator.set_stream
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize()
    cuda.is_current_stream_capturing = lambda: False


class _Stream(torch.Stream):
    """A class, since vLLM's annotations name it."""

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Any:
        return torch.Stream(device=_here() if device is None else device)


def _event(enable_timing: bool = False, blocking: bool = False, **_: Any) -> torch.Event:
    return torch.Event(_here(), enable_timing=enable_timing, blocking=blocking)


def _here() -> torch.device:
    return torch.device(NAME, torch.accelerator.current_device_index())

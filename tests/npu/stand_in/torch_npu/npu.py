"""torch.npu: the device module."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.accelerator import memory as _memory

DEVICES = 8


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def is_bf16_supported() -> bool:
    return True


def is_current_stream_capturing() -> bool:
    return False


def _is_in_bad_fork() -> bool:
    return False


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    torch.accelerator.set_device_index(index or 0)


def get_device_name(device: Any = None) -> str:
    return "Ascend910B1"


def get_device_capability(device: Any = None) -> None:
    return None


def get_device_properties(device: Any = None) -> SimpleNamespace:
    total = _memory.get_memory_info()[1]
    return SimpleNamespace(
        name=get_device_name(), total_memory=total, cube_core_num=24, vector_core_num=48, uuid="0"
    )


def get_soc_version() -> int:
    return 220


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def set_compile_mode(jit_compile: bool = False) -> None:
    pass


# The generator is the CPU's.


def manual_seed(seed: int) -> None:
    pass


def manual_seed_all(seed: int) -> None:
    pass


def initial_seed() -> int:
    return torch.initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


# vllm-ascend replaces torch.accelerator's own names by these.


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return _memory.get_memory_info()


def memory_stats(device: Any = None) -> dict[str, int]:
    return _memory.memory_stats()


def memory_allocated(device: Any = None) -> int:
    return _memory.memory_allocated()


def memory_reserved(device: Any = None) -> int:
    return _memory.memory_reserved()


def max_memory_allocated(device: Any = None) -> int:
    return _memory.max_memory_allocated()


def max_memory_reserved(device: Any = None) -> int:
    return _memory.max_memory_reserved()


def reset_peak_memory_stats(device: Any = None) -> None:
    _memory.reset_peak_memory_stats()


def empty_cache() -> None:
    pass


def ipc_collect() -> None:
    pass


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize()


_Stream, _Event = torch.Stream, torch.Event


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
        return _Stream.__new__(cls, device=torch.device("npu", current_device()))


class Event(torch.Event):
    """torch_npu's own signature: no device comes first, as it does in torch.Event's."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> Any:
        return _Event.__new__(cls, device="npu", enable_timing=enable_timing)


class ExternalEvent(Event):
    pass


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def default_stream(device: Any = None) -> torch.Stream:
    kind = torch.accelerator.current_stream().device_type
    return torch.Stream(stream_id=0, device_index=current_device(), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    if chosen is None:
        yield
        return
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(chosen)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


StreamContext = stream


@contextlib.contextmanager
def device(chosen: Any) -> Iterator[None]:
    before = current_device()
    set_device(before if chosen is None else chosen)
    try:
        yield
    finally:
        set_device(before)


class NPUGraph:
    pass


def graph(*_: Any, **__: Any) -> None:
    raise NotImplementedError("the stand-in torch_npu has no graphs")


def graph_pool_handle() -> tuple[int, int]:
    return (0, 0)


memory = SimpleNamespace(NPUPluggableAllocator=object, MemPool=object)
config = SimpleNamespace(allow_internal_format=False)

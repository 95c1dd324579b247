"""Ranges in a user's own profile: `kvpp.broadcast.layer_12` beside the kernels, under the names of our traces.

`torch.profiler.record_function` on every device, and NVTX ranges as well where torch has CUDA. On CUDA a
range is around what the host submits; the profiler ties the kernels to it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function

Call = Callable[[], object]


@contextmanager
def profiler_range(name: str) -> Iterator[None]:
    """Mark what runs inside as `name`."""
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def ranged(name: str, call: Call) -> Call:
    """`call`, marked as `name`."""

    def run() -> None:
        with profiler_range(name):
            call()

    return run

"""What the hooks cost the host on this device, and how much of the transfers' time is exposed."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvpp_dag.check_device.device import Device
from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import Arena, ForwardPass, allocate_zeroed, make_streams
from kvpp_dag.runtime.native import NativeEvent

LAYERS = 6
FORWARDS = 20
BUNDLE = 16 << 20
COMPUTE = 0.02


def measure(device: Device) -> Iterator[tuple[str, str]]:
    """Names and figures, for people."""
    host, _ = _forwards(device, compute=0.0, skip_broadcasts=True)
    yield "host, per layer", f"{host * 1e6:.1f} us"
    _, alone = _forwards(device, compute=COMPUTE, skip_broadcasts=True)
    _, both = _forwards(device, compute=COMPUTE, skip_broadcasts=False)
    _, copies = _forwards(device, compute=0.0, skip_broadcasts=False)
    what = f"device, one forward of {LAYERS} layers, {BUNDLE >> 20} MiB a layer"
    yield f"{what}, compute alone", f"{alone * 1e3:.2f} ms"
    yield f"{what}, transfers alone", f"{copies * 1e3:.2f} ms"
    yield f"{what}, both", f"{both * 1e3:.2f} ms"


class Peerless:
    """A transport of one rank of two without the other: a broadcast copies from a buffer of its own."""

    rank, size = 0, 2

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """The copy."""
        peer = torch.zeros_like(view)
        source, target = (view, peer) if owner == self.rank else (peer, view)

        def copy() -> None:
            target.copy_(source)

        return copy

    def agree(self, token: bytes) -> None:
        """There is nobody to disagree."""


def _forwards(device: Device, *, compute: float, skip_broadcasts: bool) -> tuple[float, float]:
    """Seconds of the host per layer, and of the device per forward, with `compute` seconds a layer."""
    block = (Component(name="main", bytes_per_block=BUNDLE),)
    specs = [CacheSpec(layer=f"layers.{i}", index=i, components=block) for i in range(LAYERS)]
    streams = make_streams(device.torch, timeout=60)
    start, end = (NativeEvent(device.torch, enable_timing=True) for _ in range(2))
    with device.stream() as stream:
        forward = ForwardPass(
            arena=Arena(
                plan_stage(specs, ranks=Peerless.size),
                rank=Peerless.rank,
                num_blocks=1,
                allocate=partial(allocate_zeroed, device=device.torch),
            ),
            transport=Peerless(),
            compute=streams.compute,
            transfer=streams.transfer,
            control=streams.control,
            skip_broadcasts=skip_broadcasts,
        )
        _run_forward(device, forward, compute)
        stream.synchronize()
        start.record()
        host = sum(_run_forward(device, forward, compute) for _ in range(FORWARDS))
        end.record()
        end.synchronize()
    return host / FORWARDS / LAYERS, start.elapsed_time(end) / 1e3 / FORWARDS


def _run_forward(device: Device, forward: ForwardPass, compute: float) -> float:
    """Submit one forward; return the seconds that the host spent in the hooks of its layers."""
    forward.begin(history=True)
    spent = 0.0
    for layer in range(LAYERS):
        started = time.perf_counter()
        forward.acquire(layer)
        spent += time.perf_counter() - started
        if compute:
            device.delay(compute)
        started = time.perf_counter()
        forward.release(layer)
        spent += time.perf_counter() - started
    forward.end()
    return spent

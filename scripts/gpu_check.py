"""A verdict and figures of KVPP's accelerator path on one device: `python scripts/gpu_check.py`.

Several ranks run as threads of this process on one accelerator (cuda, npu or xpu), so one device is enough;
a transfer is then a copy within the device. What two devices add, the collectives of NCCL or HCCL, is not
checked here. Takes under five minutes. Exits 0 if everything is right, 1 if not, and 2 without an
accelerator. With --test-device DIR it runs without one on the tests' own device, which it builds under DIR
with the machine's C++ compiler.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import (
    Arena,
    Completion,
    ForwardPass,
    allocate_zeroed,
    find_accelerator,
    make_streams,
)
from tests.device.device import Device, open_device
from tests.device.ranks import Served, Setting, reference, serve_ranks

RANKS, LAYERS = 2, 6
BLOCKS = (0, 1, 2, 0, 1, 2, 3)
FORWARDS = 20
BUNDLE = 16 << 20
COMPUTE = 0.02

RIGHT = {
    f"{policy}, {name}, completion on {completion}": Setting(
        policy=policy, completion=completion, **delay
    )
    for policy in Policy
    for completion in Completion
    for name, delay in {
        "no delay": {},
        "slow compute": {"compute_delay": 0.005},
        "slow transfers": {"transfer_delay": 0.005},
    }.items()
}
WRONG = {
    "control, no broadcasts": Setting(skip_broadcasts=True),
    "control, compute does not wait": Setting(transfer_delay=0.02, dropped=COMPUTE_STREAM),
    "control, transfers do not wait": Setting(compute_delay=0.02, dropped=TRANSFER_STREAM),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print what they show; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--test-device", metavar="DIR", type=Path, help="build the tests' own device there"
    )
    options = parser.parse_args(arguments)
    if find_accelerator() is None and options.test_device is None:
        print(
            "torch finds no accelerator on this machine, so there is nothing to check.", file=sys.stderr
        )
        return 2
    device = open_device(options.test_device)
    print(f"device: {device.torch}, torch {torch.__version__}")
    failed = [name for name, passed in checks(device) if not report(name, passed)]
    for name, figure in figures(device):
        print(f"{name}: {figure}")
    print(f"verdict: {'wrong: ' + '; '.join(failed) if failed else 'right'}")
    return 1 if failed else 0


def report(name: str, passed: bool) -> bool:
    """Print one line and hand the result on."""
    print(f"{'ok  ' if passed else 'FAIL'} {name}", flush=True)
    return passed


def checks(device: Device) -> Iterator[tuple[str, bool]]:
    """Every combination against one rank that holds everything; the controls must differ from it."""
    expected = reference(device, LAYERS, BLOCKS)
    for name, setting in RIGHT.items():
        yield name, equal(serve_ranks(device, RANKS, LAYERS, BLOCKS, setting), expected)
    for name, setting in WRONG.items():
        yield name, not equal(serve_ranks(device, RANKS, LAYERS, BLOCKS, setting), expected)


def equal(served: Sequence[Served], expected: Served) -> bool:
    """Whether every rank has the outputs and caches that one rank alone has."""
    return all(
        rank.outputs == expected.outputs
        and all(rank.owned[ordinal] == expected.owned[ordinal] for ordinal in rank.owned)
        for rank in served
    )


def figures(device: Device) -> Iterator[tuple[str, str]]:
    """What the hooks cost the host, and how much of the transfers' time is exposed."""
    host, _ = forwards(device, compute=0.0, skip_broadcasts=True)
    yield "host, per layer", f"{host * 1e6:.1f} us"
    _, alone = forwards(device, compute=COMPUTE, skip_broadcasts=True)
    _, both = forwards(device, compute=COMPUTE, skip_broadcasts=False)
    _, copies = forwards(device, compute=0.0, skip_broadcasts=False)
    what = f"{LAYERS} layers, {BUNDLE >> 20} MiB a layer"
    yield f"device, one forward of {what}, compute alone", f"{alone * 1e3:.2f} ms"
    yield f"device, one forward of {what}, transfers alone", f"{copies * 1e3:.2f} ms"
    yield f"device, one forward of {what}, both", f"{both * 1e3:.2f} ms"


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


def forwards(device: Device, *, compute: float, skip_broadcasts: bool) -> tuple[float, float]:
    """Seconds of the host per layer, and of the device per forward, with `compute` seconds a layer."""
    block = (Component(name="main", bytes_per_block=BUNDLE),)
    specs = [CacheSpec(layer=f"layers.{i}", index=i, components=block) for i in range(LAYERS)]
    streams = make_streams(device.torch, timeout=60)
    start, end = (torch.Event(device.torch, enable_timing=True) for _ in range(2))
    with device.stream() as stream:
        forward = ForwardPass(
            arena=Arena(
                plan_stage(specs, ranks=RANKS),
                rank=0,
                num_blocks=1,
                allocate=partial(allocate_zeroed, device=device.torch),
            ),
            transport=Peerless(),
            compute=streams.compute,
            transfer=streams.transfer,
            control=streams.control,
            skip_broadcasts=skip_broadcasts,
        )
        run_forward(device, forward, compute)
        stream.synchronize()
        start.record()
        host = sum(run_forward(device, forward, compute) for _ in range(FORWARDS))
        end.record()
        end.synchronize()
    return host / FORWARDS / LAYERS, start.elapsed_time(end) / 1e3 / FORWARDS


def run_forward(device: Device, forward: ForwardPass, compute: float) -> float:
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


if __name__ == "__main__":
    sys.exit(main())

"""Ranks that run the self check on a device, and what is left out or done wrong beneath it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.plan import plan_stage
from kvpp_dag.runtime import (
    AcceleratorStream,
    Arena,
    CpuStream,
    CurrentStream,
    ForwardPass,
    Observer,
    Payload,
    Streams,
    Transport,
    allocate_zeroed,
    check_forwards,
)
from tests.device.device import Device
from tests.device.ranks import PATIENCE
from tests.runtime_support import run_threads, small_specs


@dataclass(frozen=True, kw_only=True)
class Check:
    """How ranks run the self check; `dropped` is the stream whose waits are left out, on `on` alone if given."""

    layers: int = 5
    blocks: int = 64
    depth: int = 1
    policy: Policy = Policy.ON_ACQUIRE
    payload: Payload = Payload.AUTO
    dropped: str | None = None
    skip_broadcasts: bool = False
    wrap: Callable[[Transport], Transport] | None = None
    observer: Callable[[int], Observer] | None = None
    after: Callable[["Rank"], object] | None = None


class Rank:
    """A rank as an engine starts it, up to the point at which it is checked."""

    def __init__(self, device: Device, transport: Transport, check: Check) -> None:
        plan = plan_stage(
            small_specs(check.layers),
            ranks=transport.size,
            depth=check.depth,
            staging=check.payload is not Payload.FULL,
        )
        self.device = device
        self.transport = check.wrap(transport) if check.wrap else transport
        self.arena = Arena(
            plan,
            rank=transport.rank,
            num_blocks=check.blocks,
            allocate=partial(allocate_zeroed, device=device.torch),
        )
        self.streams = Streams(
            compute=_Compute(check, device),
            transfer=_Beside(TRANSFER_STREAM, check, device),
            copy=_Beside(COPY_STREAM, check, device),
            control=CpuStream("control", timeout=PATIENCE),
        )
        self.forward = ForwardPass(
            arena=self.arena,
            transport=self.transport,
            compute=self.streams.compute,
            transfer=self.streams.transfer,
            copy=self.streams.copy,
            control=self.streams.control,
            policy=check.policy,
            payload=check.payload,
            observer=check.observer(transport.rank) if check.observer else None,
            skip_broadcasts=check.skip_broadcasts,
            timeout=PATIENCE,
        )

    def check(self):
        return check_forwards(
            self.forward,
            arena=self.arena,
            transport=self.transport,
            streams=self.streams,
            timeout=PATIENCE,
        )


class _Compute(CurrentStream):
    def __init__(self, check: Check, device: Device) -> None:
        super().__init__(COMPUTE_STREAM, device.torch, timeout=PATIENCE)
        self._drops = check.dropped == COMPUTE_STREAM

    def wait(self, event):
        if not self._drops:
            super().wait(event)


class _Beside(AcceleratorStream):
    def __init__(self, name: str, check: Check, device: Device) -> None:
        super().__init__(name, device.torch)
        self._drops = check.dropped == name

    def wait(self, event):
        if not self._drops:
            super().wait(event)


def run_check(transport: Transport, device: Device, check: Check) -> object:
    """The self check of one rank, and what `check.after` says of it."""
    with device.stream():
        rank = Rank(device, transport, check)
        checked = rank.check()
        return checked, check.after(rank) if check.after else None


def check_ranks(device: Device, ranks: int = 2, **settings: object) -> list[object]:
    """`run_check` on every rank of a local group; an exception takes the place of a result."""
    work = partial(run_check, device=device, check=Check(**settings))
    results = run_threads(ranks, work, timeout=PATIENCE)
    torch.accelerator.synchronize()
    return results

"""A deterministic model whose every step is submitted to a device, as one rank of a KVPP group runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from kvpp_dag.check_device.device import PATIENCE, Device
from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.plan import CacheSpec, Component, StagePlan, plan_stage
from kvpp_dag.runtime import (
    AcceleratorStream,
    Arena,
    Completion,
    Costs,
    CpuStream,
    CurrentStream,
    ForwardPass,
    Observer,
    Payload,
    Transport,
    allocate_zeroed,
)
from kvpp_dag.runtime.payload import Way

NUM_BLOCKS = 16
STRIDE = 5
"""From one block of a sequence to its next: coprime to NUM_BLOCKS, so that histories lie in several runs."""

PRIME = 1_000_003
KEPT = 64
"""Outputs that are kept, of the latest tokens."""

_DEAR = 1.0
WAYS = {
    Way.FULL: (Payload.FULL, Costs()),
    Way.RUNS: (Payload.ACTIVE, Costs(copy_start=_DEAR, copy=_DEAR)),
    Way.PACKED: (Payload.ACTIVE, Costs(start=0, run=_DEAR, copy_start=0, send=0, copy=0)),
}
"""With which payload and costs a forward with history sends in which way."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How ranks run: seconds of delay on the device per layer, and what a control leaves out.

    `dropped` is the stream, compute, transfer or copy, that ignores the waits it is given.
    """

    way: Way = Way.FULL
    policy: Policy = Policy.ON_ACQUIRE
    depth: int = 1
    completion: Completion = Completion.STREAM
    compute_delay: float = 0.0
    transfer_delay: float = 0.0
    dropped: str | None = None
    skip_broadcasts: bool = False
    timeout: float = PATIENCE


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a rank has to show: outputs by token, the layers that it owns, and how much was sent to that end."""

    outputs: list[int]
    owned: dict[int, bytes]
    broadcasts: int
    bytes: int


def check_plan(layers: int, ranks: int, setting: Setting) -> StagePlan:
    """Target layers of three sizes, every other one with an indexer."""
    specs = []
    for i in range(layers):
        components = [Component(name="main", bytes_per_block=24 + 8 * (i % 3))]
        if i % 2 == 0:
            components.append(Component(name="indexer", bytes_per_block=8))
        specs.append(CacheSpec(layer=f"layers.{i}", index=i, components=tuple(components)))
    staging = setting.way is not Way.FULL
    return plan_stage(specs, ranks=ranks, depth=setting.depth, staging=staging)


class DeviceEngine:
    """One rank. `run` submits a forward and returns at once; `results` waits for what it computed.

    Every output depends on every cached byte before it. With `group`, a process group of the engine's own,
    every layer ends with a collective of it on the compute stream, as tensor parallelism's do.
    """

    def __init__(
        self,
        device: Device,
        plan: StagePlan,
        transport: Transport,
        setting: Setting,
        *,
        observer: Observer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.device = device
        self.setting = setting
        self.rank = transport.rank
        self.group = group
        allocate = partial(allocate_zeroed, device=device.torch)
        self.arena = Arena(plan, rank=self.rank, num_blocks=NUM_BLOCKS, allocate=allocate)
        payload, costs = WAYS[setting.way]
        self.forward = ForwardPass(
            arena=self.arena,
            transport=Delayed(transport, device, setting.transfer_delay),
            compute=self.compute_stream_of(),
            transfer=self.side_stream_of(TRANSFER_STREAM),
            copy=self.side_stream_of(COPY_STREAM),
            control=CpuStream("control", timeout=setting.timeout),
            policy=setting.policy,
            payload=payload,
            costs=costs,
            timeout=setting.timeout,
            observer=observer,
            skip_broadcasts=setting.skip_broadcasts,
        )
        self._allocate_for_compute(max((b.bytes_per_block for b in plan.bundles), default=1))
        self.compute_stream = device.stream()
        torch.accelerator.synchronize(device.torch)  # what was filled so far was on another stream

    def compute_stream_of(self) -> CurrentStream:
        """The compute stream, without its waits if the setting drops them."""
        setting = self.setting
        kind = Unwaiting if setting.dropped == COMPUTE_STREAM else CurrentStream
        return kind(
            COMPUTE_STREAM,
            self.device.torch,
            timeout=setting.timeout,
            completion=setting.completion,
        )

    def side_stream_of(self, name: str) -> AcceleratorStream:
        """The transfer or copy stream, without its waits if the setting drops them."""
        if self.setting.dropped != name:
            return AcceleratorStream(name, self.device.torch)
        return (
            UnwaitingCopy(name, self.device.torch)
            if name == COPY_STREAM
            else UnwaitingTransfer(name, self.device.torch)
        )

    def run(self, token: int, block: int) -> None:
        """Submit the forward that caches block number `block` of a sequence and reads those before it."""
        with self.compute_stream:
            self.forward.begin(
                history=block > 0,
                used=sorted(self._blocks[:block]),
                fresh=[self._blocks[block]],
            )
            self.x.fill_(token + 1)
            for bundle in self.forward.plan.bundles:
                self.forward.acquire(bundle.ordinal)
                self.attend(token, bundle.ordinal, block)
                self.forward.release(bundle.ordinal)
                if self.group is not None:  # equal on all ranks, so that the greatest is each one's own
                    dist.all_reduce(self.x, dist.ReduceOp.MAX, self.group)
            self.outputs[token % KEPT : token % KEPT + 1].copy_(self.x)
            self.forward.end()

    def attend(self, token: int, layer: int, block: int) -> None:
        """The attention of one layer: every byte of its history goes into `x`, and `x` into its new block."""
        if self.setting.compute_delay:
            self.device.delay(self.setting.compute_delay)
        for component in self.arena.plan.bundles[layer].spec.components:
            view = self.arena.component(layer, component.name)
            size = view.shape[1]
            if block:
                history = self.gathered[: block * size]
                for i, held in enumerate(self._blocks[:block]):
                    history[i * size : (i + 1) * size].copy_(view[held])
                products = self.products[: block * size]
                torch.mul(history, self.weights[: block * size], out=products)
                torch.sum(products, 0, keepdim=True, out=self.sum)
                self.x.mul_(31).add_(self.sum).remainder_(PRIME)
            fresh = self.products[:size]
            torch.mul(self.weights[:size], self.x, out=fresh)
            view[self._blocks[block]].copy_(fresh.remainder_(251))

    def poison(self, value: int) -> None:
        """Fill the scratch slots, in the order of the compute stream."""
        with self.compute_stream:
            for slot in range(self.arena.plan.slots if self.arena.plan.bundles else 0):
                self.arena.scratch(slot).fill_(value)

    def results(self, count: int) -> list[int]:
        """The first outputs, once the device has computed them."""
        with self.compute_stream:
            kept: list[int] = self.outputs[:count].cpu().tolist()
        return kept

    def served(self, count: int) -> Served:
        """All that there is to show after `count` forwards, once the device is done with them."""
        outputs = self.results(count)
        # In a control transfers outlast the forward, and their memory must not be freed under them.
        torch.accelerator.synchronize(self.device.torch)
        with self.compute_stream:
            owned = {
                b.ordinal: self.arena.cache(b.ordinal).cpu().numpy().tobytes()
                for b in self.forward.plan.owned(self.rank)
            }
        return Served(
            outputs=outputs,
            owned=owned,
            broadcasts=self.forward.broadcasts_sent,
            bytes=self.forward.bytes_sent,
        )

    def _allocate_for_compute(self, page: int) -> None:
        """All that compute needs, so that a forward allocates nothing; `page` is the largest one's bytes."""
        self._blocks = [i * STRIDE % NUM_BLOCKS for i in range(NUM_BLOCKS)]
        largest, device = page * NUM_BLOCKS, self.device.torch
        self.weights = (torch.arange(largest) * 7919 % 1009 + 1).to(device)
        self.gathered = torch.zeros(largest, dtype=torch.uint8, device=device)
        self.products = torch.zeros(largest, dtype=torch.int64, device=device)
        self.sum = torch.zeros(1, dtype=torch.int64, device=device)
        self.x = torch.zeros(1, dtype=torch.int64, device=device)
        self.outputs = torch.zeros(KEPT, dtype=torch.int64, device=device)


class Delayed:
    """A transport whose broadcasts take `seconds` longer on the device."""

    def __init__(self, inner: Transport, device: Device, seconds: float) -> None:
        self.inner, self.device, self.seconds = inner, device, seconds
        self.rank, self.size = inner.rank, inner.size

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """The broadcast, behind the delay."""
        broadcast = self.inner.prepare(view, owner)
        if not self.seconds:
            return broadcast

        def delayed() -> None:
            self.device.delay(self.seconds)
            broadcast()

        return delayed

    def agree(self, token: bytes) -> None:
        """As the transport within does."""
        self.inner.agree(token)


class Unwaiting(CurrentStream):
    """A compute stream that waits for nothing: a control."""

    def wait(self, event: Any) -> None:
        """Go on at once."""


class UnwaitingTransfer(AcceleratorStream):
    """A transfer stream that waits for nothing: a control."""

    def wait(self, event: Any) -> None:
        """Go on at once."""


class UnwaitingCopy(AcceleratorStream):
    """A copy stream that does not wait for what is sent: a control.

    It waits for compute, behind which the numbers of the blocks arrive: wrong ones would be a fault of the device.
    """

    def wait(self, event: Any) -> None:
        """Go on at once, unless the event is one of the compute stream."""
        if event.name.startswith("ready["):
            super().wait(event)

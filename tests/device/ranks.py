"""A deterministic model whose every step is submitted to a device, and the ranks that run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import (
    AcceleratorStream,
    Arena,
    Completion,
    CpuStream,
    CurrentStream,
    ForwardPass,
    Observer,
    Transport,
    allocate_zeroed,
)
from tests.device.device import Device
from tests.runtime_support import NUM_BLOCKS, LocalGroup, run_threads, small_plan

PRIME = 1_000_003
PATIENCE = 30.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How ranks run: seconds of delay on the device per layer, and what a control leaves out.

    `dropped` is the stream, compute or transfer, that ignores the waits it is given.
    `fail[rank] = (forward, layer)` makes a rank's compute raise there; all ranks then repeat the forward.
    """

    policy: Policy = Policy.ON_ACQUIRE
    depth: int = 1
    completion: Completion = Completion.STREAM
    compute_delay: float = 0.0
    transfer_delay: float = 0.0
    dropped: str | None = None
    skip_broadcasts: bool = False
    fail: dict[int, tuple[int, int]] = field(default_factory=dict)
    wrap: Callable[[Transport], Transport] | None = None
    timeout: float = PATIENCE
    log: Callable[[int, str, str], object] | None = None
    observer: Callable[[int], Observer] | None = None


class DeviceEngine:
    """One rank. `run` submits a forward and returns at once; `output` waits for what it computed.

    Every output depends on every cached byte before it, as in `runtime_support.Engine`.
    """

    def __init__(self, device: Device, plan: StagePlan, transport: Transport, setting: Setting) -> None:
        self.device = device
        self.setting = setting
        self.rank = transport.rank
        self.arena = Arena(
            plan,
            rank=self.rank,
            num_blocks=NUM_BLOCKS,
            allocate=partial(allocate_zeroed, device=device.torch),
        )
        delayed = Delayed(transport, device, setting.transfer_delay)
        self.forward = ForwardPass(
            arena=self.arena,
            transport=setting.wrap(delayed) if setting.wrap else delayed,
            compute=_Compute(self),
            transfer=_Transfer(self),
            control=CpuStream("control", timeout=setting.timeout),
            policy=setting.policy,
            timeout=setting.timeout,
            observer=setting.observer(self.rank) if setting.observer else None,
            skip_broadcasts=setting.skip_broadcasts,
        )
        largest = max((b.bytes_per_block for b in plan.bundles), default=1) * NUM_BLOCKS
        self.weights = (torch.arange(largest) * 7919 % 1009 + 1).to(device.torch)
        self.scratch = torch.zeros(largest, dtype=torch.int64, device=device.torch)
        self.sum = torch.zeros(1, dtype=torch.int64, device=device.torch)
        self.x = torch.zeros(1, dtype=torch.int64, device=device.torch)
        self.outputs = torch.zeros(64, dtype=torch.int64, device=device.torch)
        self.compute_stream = device.stream()
        torch.accelerator.synchronize()  # what was filled so far was on another stream

    def run(self, token: int, block: int, *, fail_at: int | None = None) -> None:
        """Submit the forward that caches block `block` and reads the blocks before it."""
        with self.compute_stream:
            self.forward.begin(history=block > 0)
            self.x.fill_(token + 1)
            for bundle in self.forward.plan.bundles:
                self.forward.acquire(bundle.ordinal)
                if bundle.ordinal == fail_at:
                    raise ArithmeticError(f"compute {bundle.ordinal} fell over")
                if self.setting.compute_delay:
                    self.device.delay(self.setting.compute_delay)
                self._attend(bundle.ordinal, block)
                self.forward.release(bundle.ordinal)
            self.outputs[token % 64 : token % 64 + 1].copy_(self.x)
            self.forward.end()

    def poison(self, value: int) -> None:
        """Fill the scratch slots, in the order of the compute stream."""
        with self.compute_stream:
            for slot in range(self.arena.plan.slots if self.arena.plan.bundles else 0):
                self.arena.scratch(slot).fill_(value)

    def results(self, count: int) -> list[int]:
        """The first outputs, once the device has computed them."""
        with self.compute_stream:
            return self.outputs[:count].cpu().tolist()

    def owned_bytes(self) -> dict[int, bytes]:
        with self.compute_stream:
            owned = self.forward.plan.owned(self.rank)
            return {b.ordinal: self.arena.cache(b.ordinal).cpu().numpy().tobytes() for b in owned}

    def note(self, op: str, name: str) -> None:
        """Log what a stream was told to do."""
        if self.setting.log is not None:
            self.setting.log(self.rank, op, name)

    def _attend(self, layer: int, block: int) -> None:
        for component in self.arena.plan.bundles[layer].spec.components:
            view = self.arena.component(layer, component.name)
            size = view.shape[1]
            if block:
                history = view[:block].view(-1)
                products = self.scratch[: block * size]
                torch.mul(history, self.weights[: block * size], out=products)
                torch.sum(products, 0, keepdim=True, out=self.sum)
                self.x.mul_(31).add_(self.sum).remainder_(PRIME)
            fresh = self.scratch[:size]
            torch.mul(self.weights[:size], self.x, out=fresh)
            view[block].copy_(fresh.remainder_(251))


class Delayed:
    """A transport whose broadcasts take `seconds` longer on the device."""

    def __init__(self, inner: Transport, device: Device, seconds: float) -> None:
        self.inner, self.device, self.seconds = inner, device, seconds
        self.rank, self.size = inner.rank, inner.size

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        broadcast = self.inner.prepare(view, owner)
        if not self.seconds:
            return broadcast

        def delayed() -> None:
            self.device.delay(self.seconds)
            broadcast()

        return delayed

    def agree(self, token: bytes) -> None:
        self.inner.agree(token)


class _Compute(CurrentStream):
    def __init__(self, engine: DeviceEngine) -> None:
        setting = engine.setting
        super().__init__(
            COMPUTE_STREAM, engine.device.torch, timeout=setting.timeout, completion=setting.completion
        )
        self._engine = engine

    def record(self, event):
        self._engine.note("record", event.name)
        super().record(event)

    def wait(self, event):
        self._engine.note("wait", event.name)
        if self._engine.setting.dropped != COMPUTE_STREAM:
            super().wait(event)


class _Transfer(AcceleratorStream):
    def __init__(self, engine: DeviceEngine) -> None:
        super().__init__(TRANSFER_STREAM, engine.device.torch)
        self._engine = engine

    def launch(self, work):
        self._engine.note("launch", "")
        super().launch(work)

    def record(self, event):
        self._engine.note("record", event.name)
        super().record(event)

    def wait(self, event):
        self._engine.note("wait", event.name)
        if self._engine.setting.dropped != TRANSFER_STREAM:
            super().wait(event)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a rank has to show: outputs by token and the layers that it owns."""

    outputs: list[int]
    owned: dict[int, bytes]


def serve(
    transport: Transport, device: Device, layers: int, blocks: Sequence[int], setting: Setting
) -> Served:
    """Submit one forward per item of `blocks`, and look only when all are submitted."""
    engine = DeviceEngine(device, small_plan(layers, transport.size, setting.depth), transport, setting)
    repeated = {forward for forward, _ in setting.fail.values()}
    for token, block in enumerate(blocks):
        engine.poison(0xEE)
        if token in repeated:
            forward, layer = setting.fail.get(transport.rank, (-1, -1))
            try:
                engine.run(token, block, fail_at=layer if forward == token else None)
            except ArithmeticError as error:
                with engine.compute_stream:
                    engine.forward.abort(error)
        engine.run(token, block)
    return Served(outputs=engine.results(len(blocks)), owned=engine.owned_bytes())


def serve_ranks(
    device: Device, ranks: int, layers: int, blocks: Sequence[int], setting: Setting | None = None
) -> list[Served]:
    """`serve` on every rank of a local group."""
    work = partial(serve, device=device, layers=layers, blocks=blocks, setting=setting or Setting())
    results = run_threads(ranks, work, timeout=PATIENCE)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def reference(device: Device, layers: int, blocks: Sequence[int]) -> Served:
    """One rank that holds every layer and transfers nothing."""
    return serve(LocalGroup(1).transport(0), device, layers, blocks, Setting())


def one_rank(device, **setting):
    """An engine whose layers all belong to a peer that does nothing, so that it can run alone."""
    return DeviceEngine(device, small_plan(4, 2), Alone(), Setting(**setting))


class Alone:
    """A transport without peers: a broadcast is a write into its own buffer."""

    rank, size = 0, 2

    def prepare(self, view, owner):
        return lambda: view.fill_(owner + 3)

    def agree(self, token):
        pass

"""Paged caches of a layer in two layouts that only an NPU has, and the two ways to keep them.

A cache is bytes: per component uint8 [blocks, bytes per block], a block being 128 tokens. `LayerCache`
gives those bytes their meaning; `PlainCaches` keeps every layer on every rank, `KvppCaches` only the
layers that this rank owns.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import Arena, CpuStream, ForwardPass, HostStream, Transport
from tests.reference.partial import PartialTransport
from tests.runtime_support import GuardedMemory

BLOCK = 128
LATENT, ROPE, INDEX = 512, 64, 128
SCALED_TOGETHER = 128
FP8 = torch.float8_e4m3fn
COMPONENTS = ("main", "indexer", "scales")
TIMEOUT = 30.0


class MainCodec(Protocol):
    """How one token's latent and rope become `nbytes` bytes, and back."""

    nbytes: int

    def pack(self, kv: torch.Tensor) -> torch.Tensor: ...

    def unpack(self, rows: torch.Tensor) -> torch.Tensor: ...


class Bf16Main:
    """576 bf16 numbers."""

    nbytes = 2 * (LATENT + ROPE)

    def pack(self, kv: torch.Tensor) -> torch.Tensor:
        return kv.to(torch.bfloat16).view(torch.uint8)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.bfloat16).float()


class PackedMain:
    """512 fp8 numbers, 4 fp32 scales of 128 numbers each, 64 bf16 numbers of rope."""

    scales = LATENT // SCALED_TOGETHER
    nbytes = LATENT + 4 * scales + 2 * ROPE

    def pack(self, kv: torch.Tensor) -> torch.Tensor:
        latent = kv[:, :LATENT].reshape(len(kv), self.scales, SCALED_TOGETHER)
        scales = latent.abs().amax(-1).clamp_min(1e-6) / torch.finfo(FP8).max
        numbers = (latent / scales[..., None]).to(FP8).reshape(len(kv), LATENT)
        rope = kv[:, LATENT:].to(torch.bfloat16)
        return torch.cat([part.view(torch.uint8) for part in (numbers, scales, rope)], dim=1)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        numbers = rows[..., :LATENT].view(FP8).float().unflatten(-1, (self.scales, SCALED_TOGETHER))
        scales = rows[..., LATENT : -2 * ROPE].view(torch.float32)
        latent = (numbers * scales[..., None]).flatten(-2)
        return torch.cat([latent, rows[..., -2 * ROPE :].view(torch.bfloat16).float()], dim=-1)


LAYOUTS: dict[str, MainCodec] = {"li-c8": Bf16Main(), "sfa-c8": PackedMain()}
"""Both have the int8 indexer with fp16 scales (LI-C8); SFA-C8 packs the main cache as well."""


def cache_spec(layer: str, index: int, layout: str, *, indexer: bool, draft: bool = False) -> CacheSpec:
    """The components of one layer, in bundle order."""
    sizes = {"main": LAYOUTS[layout].nbytes}
    if indexer:
        sizes |= {"indexer": INDEX, "scales": 2}
    components = tuple(Component(name=n, bytes_per_block=BLOCK * size) for n, size in sizes.items())
    return CacheSpec(layer=layer, index=index, components=components, draft=draft)


class LayerCache:
    """Reads and writes one layer's caches; `slots` are token numbers, `block * 128 + offset`."""

    def __init__(self, codec: MainCodec, components: Mapping[str, torch.Tensor]) -> None:
        self._codec = codec
        self._main = components["main"].view(-1, codec.nbytes)
        if "indexer" in components:
            self._keys = components["indexer"].view(torch.int8).view(-1, INDEX)
            self._scales = components["scales"].view(torch.float16).view(-1)

    def write_main(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        self._main[slots] = self._codec.pack(kv)

    def read_main(self, slots: torch.Tensor) -> torch.Tensor:
        return self._codec.unpack(self._main[slots])

    def write_keys(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        scales = (keys.abs().amax(-1).clamp_min(1e-3) / 127).to(torch.float16)
        self._keys[slots] = (keys / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
        self._scales[slots] = scales

    def read_keys(self, slots: torch.Tensor) -> torch.Tensor:
        return self._keys[slots].float() * self._scales[slots].float()[:, None]


class Caches(Protocol):
    """The caches of one stage on one rank, around a forward and around each layer of it."""

    def begin(self, *, history: bool) -> None: ...

    def held(self, layer: str) -> AbstractContextManager[LayerCache]:
        """The layer's cache, from its first access to its last in this forward."""

    def end(self) -> None: ...

    def kept(self) -> dict[str, str]:
        """Digest of the bytes of every layer that this rank keeps, drafts included."""

    def intact(self) -> bool:
        """Whether the bytes around every buffer are untouched."""

    def close(self) -> None: ...


class PlainCaches:
    """Every rank keeps every layer, as without KVPP; uses nothing of kvpp_dag's runtime."""

    def __init__(self, specs: Sequence[CacheSpec], layout: str, num_blocks: int) -> None:
        self._memory = GuardedMemory()
        self._stored = {
            spec.layer: {
                c.name: self._memory(c.bytes_per_block * num_blocks).view(num_blocks, c.bytes_per_block)
                for c in spec.components
            }
            for spec in specs
        }
        self._layers = {n: LayerCache(LAYOUTS[layout], stored) for n, stored in self._stored.items()}

    def begin(self, *, history: bool) -> None:
        pass

    @contextmanager
    def held(self, layer: str) -> Iterator[LayerCache]:
        yield self._layers[layer]

    def end(self) -> None:
        pass

    def kept(self) -> dict[str, str]:
        return {name: digest(*stored.values()) for name, stored in self._stored.items()}

    def intact(self) -> bool:
        return self._memory.guards_intact()

    def close(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Kvpp:
    """How KVPP runs. `sent` are the components that are broadcast; less than all is a control.

    `poison` fills all scratch before every forward: a byte, or random bytes if it is None.
    """

    policy: Policy = Policy.ON_ACQUIRE
    depth: int = 1
    sent: tuple[str, ...] = COMPONENTS
    poison: int | None = 0xFF

    @property
    def control(self) -> bool:
        """Whether something is left out, so that outputs must differ."""
        return self.sent != COMPONENTS


class KvppCaches:
    """A rank keeps the layers that it owns, two scratch slots, and its draft layers."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        layout: str,
        num_blocks: int,
        transport: Transport,
        kvpp: Kvpp,
    ) -> None:
        self._memory = GuardedMemory()
        self._plan = plan = plan_stage(specs, ranks=transport.size, depth=kvpp.depth)
        self._arena = arena = Arena(
            plan, rank=transport.rank, num_blocks=num_blocks, allocate=self._memory
        )
        self._transfer = CpuStream(TRANSFER_STREAM, timeout=TIMEOUT)
        self._forward = ForwardPass(
            arena=arena,
            transport=PartialTransport(transport, plan, num_blocks, kvpp.sent),
            compute=HostStream(COMPUTE_STREAM, timeout=TIMEOUT),
            transfer=self._transfer,
            policy=kvpp.policy,
            timeout=TIMEOUT,
            skip_broadcasts=not kvpp.sent,
        )
        transport.agree(self._forward.signature)
        self._poison = kvpp.poison
        self._random = torch.Generator().manual_seed(transport.rank)
        self._ordinals = {bundle.layer: bundle.ordinal for bundle in plan.bundles}
        codec = LAYOUTS[layout]
        self._layers = {
            b.layer: LayerCache(
                codec, {c.name: arena.component(b.ordinal, c.name) for c in b.spec.components}
            )
            for b in plan.bundles
        } | {
            s.layer: LayerCache(codec, {c.name: arena.draft(s.layer, c.name) for c in s.components})
            for s in plan.drafts
        }

    def begin(self, *, history: bool) -> None:
        for slot in range(self._plan.slots):
            scratch = self._arena.scratch(slot)
            if self._poison is None:
                scratch.random_(0, 256, generator=self._random)
            else:
                scratch.fill_(self._poison)
        self._forward.begin(history=history)

    @contextmanager
    def held(self, layer: str) -> Iterator[LayerCache]:
        ordinal = self._ordinals.get(layer)
        if ordinal is None:  # a draft layer: every rank has its own
            yield self._layers[layer]
            return
        self._forward.acquire(ordinal)
        yield self._layers[layer]
        self._forward.release(ordinal)

    def end(self) -> None:
        self._forward.end()

    def kept(self) -> dict[str, str]:
        arena, plan = self._arena, self._plan
        owned = {b.layer: digest(arena.cache(b.ordinal)) for b in plan.owned(arena.rank)}
        return owned | {
            s.layer: digest(*(arena.draft(s.layer, c.name) for c in s.components)) for s in plan.drafts
        }

    def intact(self) -> bool:
        return self._memory.guards_intact()

    def close(self) -> None:
        self._transfer.close()


def digest(*tensors: torch.Tensor) -> str:
    """One hash over the bytes of some tensors, in order."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return state.hexdigest()

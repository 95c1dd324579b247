"""Storage of one rank: persistent buffers, scratch slots, staging halves, draft caches, and views into them.

Every bundle is one contiguous run of bytes. Component `c` of a bundle over `n` blocks takes
`n * c.bytes_per_block` bytes, components in the order of the cache spec.
"""

from collections.abc import Callable

import torch

from kvpp_dag.errors import LayoutError
from kvpp_dag.plan import CacheSpec, StagePlan

Allocate = Callable[[int], torch.Tensor]
"""Given a number of bytes, returns a contiguous 1-D uint8 tensor of that length.

It begins at a multiple of `ALIGNMENT` bytes, of memory and of its own storage.
"""

ALIGNMENT = 8
"""Bytes of the widest integers as which blocks are copied; torch asks it of a view's storage offset too."""


def allocate_zeroed(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The default allocator: zeroed memory of `device`, the host's if none is given."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class Arena:
    """The KV storage of `rank` for `num_blocks` blocks.

    `allocate` is called once per owned bundle, scratch slot, staging half and draft layer, so that an engine
    can supply the memory. Raises LayoutError if it returns something else than was asked for.
    """

    def __init__(
        self,
        plan: StagePlan,
        *,
        rank: int,
        num_blocks: int,
        allocate: Allocate = allocate_zeroed,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.num_blocks = num_blocks

        def take(nbytes: int) -> torch.Tensor:
            return _checked(allocate(nbytes), nbytes)

        self._persistent = {b.ordinal: take(b.bytes_per_block * num_blocks) for b in plan.owned(rank)}
        slot_bytes = plan.largest_bundle * num_blocks
        self._scratch = [take(slot_bytes) for _ in range(plan.slots)] if slot_bytes else []
        half = plan.staging_blocks(num_blocks) * plan.largest_bundle
        self._staging = [take(half) for _ in range(2)] if half else []
        self._drafts = {s.layer: take(s.bytes_per_block * num_blocks) for s in plan.drafts}

    @property
    def nbytes(self) -> int:
        """Bytes of all storage of this rank."""
        return sum(tensor.numel() for tensor in self._tensors())

    @property
    def device(self) -> torch.device:
        """Where the storage is; the host, if there is none."""
        return next((tensor.device for tensor in self._tensors()), torch.device("cpu"))

    def cache(self, ordinal: int) -> torch.Tensor:
        """The bundle of target layer `ordinal` on this rank: uint8 [bytes_per_block * num_blocks].

        The persistent buffer if this rank owns the layer, else the head of its scratch slot.
        """
        if ordinal in self._persistent:
            return self._persistent[ordinal]
        nbytes = self.plan.bundles[ordinal].bytes_per_block * self.num_blocks
        return self._scratch[self.plan.slot(ordinal)][:nbytes]

    def component(self, ordinal: int, name: str) -> torch.Tensor:
        """One component of target layer `ordinal`: uint8 [num_blocks, bytes_per_block].

        Raises KeyError if the layer has no component of that name.
        """
        return self._component(self.cache(ordinal), self.plan.bundles[ordinal].spec, name)

    def draft(self, layer: str, name: str) -> torch.Tensor:
        """One component of a draft layer: uint8 [num_blocks, bytes_per_block]."""
        spec = next(spec for spec in self.plan.drafts if spec.layer == layer)
        return self._component(self._drafts[layer], spec, name)

    def scratch(self, slot: int) -> torch.Tensor:
        """A whole scratch slot: uint8 [largest bundle * num_blocks]."""
        return self._scratch[slot]

    def staging(self, half: int) -> torch.Tensor:
        """A staging half: uint8 [staging blocks * largest bundle]. Raises IndexError without staging."""
        return self._staging[half]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._persistent.values(), *self._scratch, *self._staging, *self._drafts.values()]

    def _component(self, storage: torch.Tensor, spec: CacheSpec, name: str) -> torch.Tensor:
        offset = spec.component_offset(name, self.num_blocks)
        page = next(c.bytes_per_block for c in spec.components if c.name == name)
        return storage[offset : offset + page * self.num_blocks].view(self.num_blocks, page)


def _checked(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    if tensor.dtype != torch.uint8 or tensor.shape != (nbytes,) or not tensor.is_contiguous():
        raise LayoutError(
            f"The allocator returned {tensor.dtype} of shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; expected a contiguous uint8 tensor of {nbytes} bytes."
        )
    if tensor.data_ptr() % ALIGNMENT or tensor.storage_offset() % ALIGNMENT:
        raise LayoutError(
            f"The allocator returned {nbytes} bytes that begin at address {tensor.data_ptr():#x}, "
            f"{tensor.storage_offset()} bytes into their storage; expected multiples of {ALIGNMENT} for both, "
            "as blocks are copied as integers of that width. Align what it returns."
        )
    return tensor

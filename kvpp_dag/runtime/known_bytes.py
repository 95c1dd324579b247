"""Known bytes in the caches of one rank: written and compared by the device, in the order of the current stream.

Every integer of a block says whose it is: owner, layer, component, block, forward and place in the page all
change it. So what another layer, forward, block or slot left there is told from what belongs there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.packing import component_rows
from kvpp_dag.runtime.payload import Ids

_OWNER, _LAYER, _COMPONENT, _FORWARD, _BLOCK, _PLACE = (
    0x5851F42D4C957F0B,
    0x9E3779B97F4A7C25,
    0xC2B2AE3D27D4EB11,
    0x165667B19E3779E5,
    0xD6E8FEB86659FD4F,
    0xA0761D6478BD6403,
)
"""What one step of each adds; odd, and different in their lowest bytes, which are all that narrow pages have."""

POISON = 0x5B
"""The byte that fills what has been compared."""

_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.int16: np.int16, torch.uint8: np.uint8}


class KnownBytes:
    """Writes and compares the blocks `ids[n]` of the caches in `arena` for forward `n`, which counts from 0.

    After construction nothing is allocated but views, and only `wrong` waits for the device.
    """

    def __init__(self, arena: Arena, ids: Sequence[Ids]) -> None:
        plan, device = arena.plan, arena.device
        self._plan = plan
        self._rows = [component_rows(arena, bundle.ordinal) for bundle in plan.bundles]
        self._keys = [some.tobytes() for some in ids]
        self._ids = {some.tobytes(): torch.from_numpy(some).to(device) for some in ids}
        shapes = {(rows.dtype, rows.shape[1]) for rows in chain(*self._rows)}
        most = max(map(len, ids))
        nbytes = most * max(dtype.itemsize * width for dtype, width in shapes)
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(3)]
        self._places = {
            (some.tobytes(), dtype, width): _Place.of(some, dtype, width, memory)
            for some in ids
            for dtype, width in shapes
        }
        size = (len(ids), len(plan.bundles), max(map(len, self._rows)), most)
        self._wrong = torch.zeros(size, dtype=torch.bool, device=device)

    def write(self, ordinal: int, forward: int) -> None:
        """Put what `forward` is to send of target layer `ordinal` where this rank keeps it."""
        ids = self._ids[self._keys[forward]]
        for part, rows in enumerate(self._rows[ordinal]):
            rows.index_copy_(0, ids, self._expect(rows, ordinal, part, forward).want)

    def poison(self, ordinal: int, forward: int) -> None:
        """Overwrite what this rank holds of target layer `ordinal` for `forward`."""
        ids = self._ids[self._keys[forward]]
        for rows in self._rows[ordinal]:
            rows.index_fill_(0, ids, int.from_bytes(bytes([POISON]) * rows.element_size()))

    def compare(self, ordinal: int, forward: int) -> None:
        """Note of every block whether target layer `ordinal` holds what `forward` is to send of it."""
        ids = self._ids[self._keys[forward]]
        for part, rows in enumerate(self._rows[ordinal]):
            place = self._expect(rows, ordinal, part, forward)
            torch.index_select(rows, 0, ids, out=place.found)
            torch.ne(place.found, place.want, out=place.differs)
            torch.any(place.differs, 1, out=self._wrong[forward, ordinal, part, : len(ids)])

    def wrong(self) -> NDArray[np.int64]:
        """Forward, target layer, component, and place among the forward's blocks of each that differed: [n, 4].

        In ascending order. Waits for the current stream.
        """
        return np.argwhere(self._wrong.cpu().numpy())

    def clear(self) -> None:
        """Zero all blocks of any forward, of every layer and slot of this rank."""
        for ids in self._ids.values():
            for rows in chain(*self._rows):
                rows.index_fill_(0, ids, 0)

    def _expect(self, rows: torch.Tensor, ordinal: int, part: int, forward: int) -> "_Place":
        """Make what the blocks of `forward` are to hold in one component."""
        place = self._places[self._keys[forward], rows.dtype, rows.shape[1]]
        label = self._plan.owners[ordinal] * _OWNER + ordinal * _LAYER + part * _COMPONENT
        torch.add(place.table, _wrapped(label + forward * _FORWARD, rows.dtype), out=place.want)
        return place


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where some blocks of one width are made, gathered and compared, all [blocks, page in integers].

    `table` is the part of the known bytes that depends on block and place. The others share their memory with
    other blocks: the stream uses them for one at a time.
    """

    table: torch.Tensor
    want: torch.Tensor
    found: torch.Tensor
    differs: torch.Tensor

    @classmethod
    def of(cls, ids: Ids, dtype: torch.dtype, width: int, memory: Sequence[torch.Tensor]) -> "_Place":
        want, found, differs = memory
        size = len(ids) * width
        shape = (len(ids), width)
        return cls(
            table=torch.from_numpy(_table(ids, dtype, width)).to(want.device),
            want=want[: size * dtype.itemsize].view(dtype).view(shape),
            found=found[: size * dtype.itemsize].view(dtype).view(shape),
            differs=differs[:size].view(torch.bool).view(shape),
        )


def _table(ids: Ids, dtype: torch.dtype, width: int) -> NDArray[np.integer]:
    """The part of the known bytes that depends on block and place: [blocks, width]."""
    blocks = ids.astype(np.uint64)[:, None] * np.uint64(_BLOCK)
    places = np.arange(width, dtype=np.uint64)[None, :] * np.uint64(_PLACE)
    return (blocks + places).astype(_NUMPY[dtype])


def _wrapped(value: int, dtype: torch.dtype) -> int:
    """`value` as an integer of `dtype` holds it."""
    bits = 8 * dtype.itemsize
    value %= 1 << bits
    return value - (1 << bits) if dtype.is_signed and value >> (bits - 1) else value

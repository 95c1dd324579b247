"""Send some blocks of a bundle: packed into staging halves, or in place as runs.

A packed chunk holds its blocks component by component, in the order of the cache spec. Rows are moved as
the widest integers that divide a page, which is several times faster than as bytes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd

import torch

from kvpp_dag.graph import Graph, Kind
from kvpp_dag.graph.nodes import TRANSFERS
from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.payload import BlocksInUse, chunk_range
from kvpp_dag.runtime.transport import Ranges, SendsRanges, Transport

Call = Callable[[], object]

Places = tuple[tuple[int, int], ...]
"""Where in a bundle each component begins, and the bytes of its page."""


class BlockLists:
    """The blocks of one forward in flight, in memory of their own on the device of the cache."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        # Zeros are ids of a block too: whoever reads a list too early copies a wrong block, and faults no device.
        host = torch.zeros(2, num_blocks, dtype=torch.int64, pin_memory=device.type != "cpu")
        self._host = host.numpy()
        self._device = host if device.type == "cpu" else torch.zeros_like(host, device=device)
        self._source = host
        self.used = 0
        self.fresh = 0
        self.runs: list[tuple[int, int]] = []
        self._ranges: dict[Places, Ranges] = {}

    def take(self, blocks: BlocksInUse, runs: list[tuple[int, int]]) -> None:
        """Copy the blocks of a forward; on an accelerator, in the order of the current stream."""
        self.used, self.fresh = len(blocks.used), len(blocks.fresh)
        self._host[0, : self.used] = blocks.used
        self._host[1, : self.fresh] = blocks.fresh
        if self._device is not self._source:
            self._device.copy_(self._source, non_blocking=True)
        self.runs = runs
        self._ranges.clear()

    def ranges(self, places: Places) -> Ranges:
        """The bytes that the runs take of a bundle with its components at `places`: once for all bundles alike."""
        if places not in self._ranges:
            self._ranges[places] = [
                (offset + start * page, offset + stop * page)
                for offset, page in places
                for start, stop in self.runs
            ]
        return self._ranges[places]

    def used_ids(self, start: int, stop: int) -> torch.Tensor:
        """Ids of the used blocks `start..stop`: int64 [stop - start]."""
        return self._device[0, start:stop]

    def fresh_ids(self) -> torch.Tensor:
        """Ids of the fresh blocks: int64 [fresh]."""
        return self._device[1, : self.fresh]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The transfers of one layer's blocks on one rank, for the forward whose blocks are in `lists`."""

    transport: Transport
    arena: Arena
    lists: BlockLists
    ordinal: int
    chunks: int

    @property
    def owner(self) -> int:
        """The rank that sends."""
        return self.arena.plan.owners[self.ordinal]

    @property
    def owned(self) -> bool:
        """Whether this rank sends."""
        return self.owner == self.arena.rank

    def pack(self, chunk: int) -> None:
        """Gather the blocks of `chunk` into its half; nothing to do where they are received."""
        start, stop = self._range(chunk)
        if not self.owned or start == stop:
            return
        ids, half, offset = self.lists.used_ids(start, stop), self._half(chunk), 0
        for rows in self._rows:
            nbytes = (stop - start) * rows.shape[1] * rows.element_size()
            packed = half[offset : offset + nbytes].view(rows.dtype).view(stop - start, rows.shape[1])
            torch.index_select(rows, 0, ids, out=packed)
            offset += nbytes

    def send(self, chunk: int) -> None:
        """Broadcast what is packed of `chunk`."""
        start, stop = self._range(chunk)
        if start == stop:
            return
        nbytes = (stop - start) * self.arena.plan.bundles[self.ordinal].bytes_per_block
        self.transport.prepare(self._half(chunk)[:nbytes], self.owner)()

    def unpack(self, chunk: int) -> None:
        """Put the blocks of `chunk` in their places; with the first chunk, clear the fresh blocks."""
        if self.owned:
            return
        if chunk == 0:
            self._clear_fresh()
        start, stop = self._range(chunk)
        if start == stop:
            return
        ids, half, offset = self.lists.used_ids(start, stop), self._half(chunk), 0
        for rows in self._rows:
            nbytes = (stop - start) * rows.shape[1] * rows.element_size()
            packed = half[offset : offset + nbytes].view(rows.dtype).view(stop - start, rows.shape[1])
            _put_rows(rows, ids, packed)
            offset += nbytes

    def send_runs(self) -> None:
        """Broadcast the runs of blocks in place, component by component, together where the transport can."""
        if not self.owned:
            self._clear_fresh()
        if self._send_ranges is not None:
            if self.lists.runs:
                self._send_ranges(self.lists.ranges(self._places))
            return
        for component in self.arena.plan.bundles[self.ordinal].spec.components:
            rows = self.arena.component(self.ordinal, component.name)
            for start, stop in self.lists.runs:
                self.transport.prepare(rows[start:stop].view(-1), self.owner)()

    def _clear_fresh(self) -> None:
        """Zero the blocks that attention is about to fill: what another layer left there could be NaN."""
        if self.lists.fresh:
            for rows in self._rows:
                rows.index_fill_(0, self.lists.fresh_ids(), 0)

    @cached_property
    def _places(self) -> Places:
        spec, blocks = self.arena.plan.bundles[self.ordinal].spec, self.arena.num_blocks
        return tuple((spec.component_offset(c.name, blocks), c.bytes_per_block) for c in spec.components)

    @cached_property
    def _send_ranges(self) -> Callable[[Ranges], None] | None:
        if not isinstance(self.transport, SendsRanges):
            return None
        return self.transport.prepare_ranges(self.arena.cache(self.ordinal), self.owner)

    def _range(self, chunk: int) -> tuple[int, int]:
        return chunk_range(self.lists.used, self.chunks, chunk)

    def _half(self, chunk: int) -> torch.Tensor:
        return self.arena.staging((self.ordinal * self.chunks + chunk) % 2)

    @cached_property
    def _rows(self) -> list[torch.Tensor]:
        return component_rows(self.arena, self.ordinal)


def component_rows(arena: Arena, ordinal: int) -> list[torch.Tensor]:
    """The components of a bundle as rows of integers: [num_blocks, page in integers]."""
    components = arena.plan.bundles[ordinal].spec.components
    views = [arena.component(ordinal, component.name) for component in components]
    width = gcd(8, *(view.shape[1] for view in views))
    dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    return [view.view(dtype) for view in views]


def _put_rows(rows: torch.Tensor, ids: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy the rows of `packed` to the rows `ids`."""
    # On a host numpy does it two to three times as fast as torch, without the interpreter lock too.
    if rows.device.type == "cpu":
        rows.numpy()[ids.numpy()] = packed.numpy()
    else:
        rows.index_copy_(0, ids, packed)


def run_calls(graph: Graph, transport: Transport, arena: Arena, lists: BlockLists) -> dict[str, Call]:
    """The call of every broadcast of a graph that sends whole bundles, sending the runs in `lists` instead."""
    packings = _packings(transport, arena, lists, 0)
    return {node.id: packings[node.layer or 0].send_runs for node in graph.broadcasts}


def packed_calls(graph: Graph, transport: Transport, arena: Arena, lists: BlockLists) -> dict[str, Call]:
    """The call of every copy and broadcast of a graph that sends chunks, for the blocks in `lists`."""
    packings = _packings(transport, arena, lists, len(graph.broadcasts) // len(arena.plan.bundles))
    calls: dict[str, Call] = {}
    counts: Counter[tuple[int, str]] = Counter()  # the chunks of a layer are listed in order
    for node in graph.nodes:
        if node.kind in TRANSFERS:
            layer = node.layer or 0
            what = "send" if node.kind is Kind.BROADCAST else "pack" if node.slot is None else "unpack"
            calls[node.id] = partial(getattr(packings[layer], what), counts[layer, what])
            counts[layer, what] += 1
    return calls


def _packings(transport: Transport, arena: Arena, lists: BlockLists, chunks: int) -> list[Packing]:
    return [
        Packing(transport=transport, arena=arena, lists=lists, ordinal=i, chunks=chunks)
        for i in range(len(arena.plan.bundles))
    ]

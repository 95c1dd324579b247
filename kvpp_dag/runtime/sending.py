"""What each forward of a rank sends: chosen when it begins, counted, and compared with the other ranks."""

import struct
import zlib
from collections.abc import Sequence

from kvpp_dag.errors import ConfigError
from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.packing import BlockLists
from kvpp_dag.runtime.payload import (
    FULL,
    NOTHING,
    RUNS,
    BlocksInUse,
    Costs,
    Ids,
    Kind,
    Payload,
    Way,
    WayChooser,
    blocks_in_use,
    filled_chunks,
)
from kvpp_dag.runtime.transport import SendsRanges, Transport

_TOKEN = struct.Struct("<8sqqqI")
"""Layout, number of the forward, chunks, blocks sent, and which ones."""


class Sending:
    """Chooses the kind of every forward of one rank; `broadcasts` and `bytes` count what all of them have sent.

    Raises ConfigError if what `payload` needs is missing: staging halves in the plan, and a stream to copy on.
    `compare_blocks` makes the ranks compare which blocks they send, and not only how many.
    """

    def __init__(
        self,
        arena: Arena,
        transport: Transport,
        *,
        payload: Payload,
        costs: Costs,
        copies: bool,
        compare_blocks: bool,
        skip_broadcasts: bool,
    ) -> None:
        plan = arena.plan
        self.broadcasts = 0
        self.bytes = 0
        self.sends = plan.ranks > 1 and bool(plan.bundles) and not skip_broadcasts
        self.chooser = None
        if payload is not Payload.FULL and plan.ranks > 1 and plan.bundles:
            self.chooser = _make_chooser(arena, payload, costs, copies)
        self._transport = transport
        self._runs_together = isinstance(transport, SendsRanges)
        self._layers = len(plan.bundles)
        self._num_blocks = arena.num_blocks
        self._bytes_per_block = sum(bundle.bytes_per_block for bundle in plan.bundles)
        self._layout = bytes.fromhex(plan.layout_hash)
        self._compare_blocks = compare_blocks
        self._chosen = (0, 0, 0, 0)

    def choose(
        self,
        forward: int,
        history: bool,
        used: Sequence[int] | Ids | None,
        fresh: Sequence[int] | Ids,
        lists: Sequence[BlockLists],
    ) -> tuple[Kind, int]:
        """The kind of forward number `forward`, and how many blocks it sends of every bundle.

        Those of `lists` whose turn it is take the blocks, where not all are sent. Raises BlocksError for blocks
        that cannot be in use.
        """
        if not self.sends or not history:
            return (FULL if history else NOTHING), 0
        kind, sent, broadcasts, digest = FULL, self._num_blocks, self._layers, 0
        if self.chooser is not None and used is not None:
            blocks = blocks_in_use(used, fresh, self._num_blocks)
            kind = self.chooser.choose(len(blocks.used), blocks.run_count)
            if kind is not FULL:
                sent = len(blocks.used)
                runs = blocks.runs() if kind == RUNS else []
                lists[forward % len(lists)].take(blocks, runs)
                if kind == RUNS and self._runs_together:
                    broadcasts = self._layers if runs else 0
                elif kind == RUNS:
                    broadcasts = len(runs) * self.chooser.pieces
                else:
                    broadcasts = self._layers * filled_chunks(sent, kind[1])
            if self._compare_blocks:
                digest = zlib.crc32(blocks.used.tobytes())
        self.broadcasts += broadcasts
        self.bytes += sent * self._bytes_per_block
        self._chosen = (forward, kind[1], sent, digest)
        return kind, sent

    def rehearse(
        self, forward: int, kind: Kind, blocks: BlocksInUse, lists: Sequence[BlockLists]
    ) -> None:
        """Take in that forward number `forward` is of `kind`, whatever it costs; it is not counted."""
        if kind not in (NOTHING, FULL):
            runs = blocks.runs() if kind[0] is not Way.PACKED else []
            lists[forward % len(lists)].take(blocks, runs)
        self._chosen = (forward, kind[1], len(blocks.used), zlib.crc32(blocks.used.tobytes()))

    def agree(self) -> None:
        """Compare the forward last chosen with those of the other ranks; raises as the transport does."""
        self._transport.agree(_TOKEN.pack(self._layout, *self._chosen))


def _make_chooser(arena: Arena, payload: Payload, costs: Costs, copies: bool) -> WayChooser:
    """What decides how a forward sends, where it may send less than everything."""
    if not arena.plan.staging:
        raise ConfigError(
            f"Payload {payload} packs blocks into staging halves, and the plan has none; plan the "
            "stage with staging."
        )
    chooser = WayChooser.of(arena.plan, arena.num_blocks, payload, costs)
    if not copies and len(chooser.chunk_counts()) > 1:
        raise ConfigError(
            f"Payload {payload} packs blocks beside the sending of others, and there is no copy stream; "
            "give one, of the kind of the transfer stream."
        )
    return chooser

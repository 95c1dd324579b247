"""What of each bundle a forward sends, and which way is the cheapest.

All of this is decided from numbers that are equal on every rank: the blocks in use come from the engine's
replicated scheduler, the costs from one rank's measurement that all have adopted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvpp_dag.errors import BlocksError
from kvpp_dag.plan import StagePlan
from kvpp_dag.plan.stage import ceil_div

Ids = NDArray[np.int64]


class Payload(StrEnum):
    """What a forward sends: all blocks, only those that its history uses, or whichever is cheaper."""

    FULL = "full"
    ACTIVE = "active"
    AUTO = "auto"


class Way(StrEnum):
    """How a forward sends: nothing, whole bundles, runs of blocks in place, or blocks packed into chunks."""

    NOTHING = "nothing"
    FULL = "full"
    RUNS = "runs"
    PACKED = "packed"


Kind = tuple[Way, int]
"""A kind of forward: the way it sends, and into how many chunks it packs."""

NOTHING: Kind = (Way.NOTHING, 0)
FULL: Kind = (Way.FULL, 0)
RUNS: Kind = (Way.RUNS, 0)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What it takes to start a transfer and a copy (seconds), and to send and to copy (seconds per byte).

    `run` is what each further run of blocks takes: as long as a transfer, unless the transport sends several
    together. The defaults are those of gloo between two processes on one host.
    """

    start: float = 100e-6
    run: float = 100e-6
    copy_start: float = 20e-6
    send: float = 1 / 4e9
    copy: float = 1 / 8e9


@dataclass(frozen=True, kw_only=True)
class BlocksInUse:
    """The blocks of a batch: `used` hold its history, `fresh` are written without having any.

    Both are ascending and without repetition, and share no block. What is in no list is not read. `breaks[i]` is
    whether a run of consecutive used blocks ends with `used[i]` and another begins with `used[i + 1]`.
    """

    used: Ids
    fresh: Ids
    breaks: NDArray[np.bool_]

    @property
    def run_count(self) -> int:
        """How many runs of consecutive used blocks there are, without making the list of them."""
        return self.breaks.tobytes().count(1) + 1 if len(self.used) else 0

    def runs(self) -> list[tuple[int, int]]:
        """First block and end of every run of consecutive used blocks."""
        if not len(self.used):
            return []
        last = np.flatnonzero(self.breaks)
        starts = self.used[np.concatenate(([0], last + 1))]
        ends = self.used[np.concatenate((last, [len(self.used) - 1]))] + 1
        return list(zip(starts.tolist(), ends.tolist(), strict=True))


def blocks_in_use(used: Sequence[int] | Ids, fresh: Sequence[int] | Ids, num_blocks: int) -> BlocksInUse:
    """Check the caller's lists; arrays of int64 are not copied.

    Raises BlocksError if a list is not ascending or has a block outside the cache.
    """
    used, fresh = np.asarray(used, dtype=np.int64), np.asarray(fresh, dtype=np.int64)
    _steps(fresh, num_blocks)
    return BlocksInUse(used=used, fresh=fresh, breaks=_steps(used, num_blocks) != 1)


def _steps(ids: Ids, num_blocks: int) -> Ids:
    """From each of `ids` to the next; raises BlocksError unless they ascend within the cache."""
    steps = ids[1:] - ids[:-1]
    inside = not len(ids) or (ids[0] >= 0 and ids[-1] < num_blocks)
    # Bytes are searched faster than numpy reduces a short array, above all once a forward: then its code is cold.
    if not inside or 0 in (steps > 0).tobytes():
        raise BlocksError(
            f"The blocks in use are {ids[:8].tolist()}...; expected each block of 0..{num_blocks - 1} "
            "at most once, in ascending order."
        )
    return steps


def chunk_range(used: int, chunks: int, chunk: int) -> tuple[int, int]:
    """The first of `used` blocks in a chunk, and the end; the last chunks may be empty."""
    size = ceil_div(used, chunks)
    return min(chunk * size, used), min((chunk + 1) * size, used)


def filled_chunks(used: int, chunks: int) -> int:
    """How many of `chunks` chunks are not empty, and so are sent; see `chunk_range`."""
    return ceil_div(used, ceil_div(used, chunks)) if used else 0


@dataclass(frozen=True, kw_only=True)
class WayChooser:
    """Decides how a forward sends, for one plan and `num_blocks` blocks of cache."""

    payload: Payload
    costs: Costs
    num_blocks: int
    staging_blocks: int
    layers: int
    pieces: int
    bytes_per_block: int

    @classmethod
    def of(cls, plan: StagePlan, num_blocks: int, payload: Payload, costs: Costs) -> "WayChooser":
        """The chooser of a plan."""
        return cls(
            payload=payload,
            costs=costs,
            num_blocks=num_blocks,
            staging_blocks=plan.staging_blocks(num_blocks),
            layers=len(plan.bundles),
            pieces=sum(len(bundle.spec.components) for bundle in plan.bundles),
            bytes_per_block=sum(bundle.bytes_per_block for bundle in plan.bundles),
        )

    def chunks(self, used: int) -> int:
        """Into how many chunks `used` blocks are packed: a power of two, so that few programs serve all."""
        pieces = ceil_div(used, self.staging_blocks) if used else 0
        return 1 << max(pieces - 1, 0).bit_length()

    def chunk_counts(self) -> list[int]:
        """All numbers of chunks that `chunks` may answer."""
        return (
            [1 << i for i in range(self.chunks(self.num_blocks).bit_length())]
            if self.staging_blocks
            else []
        )

    def choose(self, used: int, runs: int) -> Kind:
        """The cheapest way to send `used` blocks that lie in `runs` runs, and the chunks if it is `PACKED`.

        Estimated over the whole forward. `ACTIVE` never sends whole bundles; on a tie the simpler way wins.
        """
        chunks = self.chunks(used)
        kind, least = RUNS, self._in_runs(used, runs)
        if self.payload is Payload.AUTO and (full := self._in_runs(self.num_blocks, 1)) <= least:
            kind, least = FULL, full
        return (Way.PACKED, chunks) if self._packed(used, chunks) < least else kind

    def _in_runs(self, blocks: int, runs: int) -> float:
        """Seconds for runs in place; a whole bundle is one run, whatever its components."""
        more = 0 if blocks == self.num_blocks else max(runs * self.pieces - self.layers, 0)
        starting = self.layers * self.costs.start + more * self.costs.run
        return starting + blocks * self.bytes_per_block * self.costs.send

    def _packed(self, used: int, chunks: int) -> float:
        """Seconds if the copies of one chunk run beside the sending of another, but for the first and last."""
        nbytes, sent = used * self.bytes_per_block, filled_chunks(used, chunks)
        sending, copying = nbytes * self.costs.send, 2 * nbytes * self.costs.copy
        beside = max(0.0, copying / 2 - sending) if sent > 1 else 0.0
        starting = sent * (self.layers * self.costs.start + 2 * self.pieces * self.costs.copy_start)
        return starting + sending + beside + copying / max(sent, 1)

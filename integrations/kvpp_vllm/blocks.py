"""Which KV cache blocks a step of the engine uses, kept from the scheduler's outputs alone.

Every rank is given the same outputs in the same order, with either Model Runner, so all ranks keep the same
book. The numbers are the scheduler's own: the engine's block tables are rows of a batch, padded and reordered, and
on a device they may be ahead of what the host knows.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpp_dag.errors import BlocksError
from kvpp_dag.runtime.payload import Ids

NULL_BLOCK = 0
"""The block that vLLM gives to no request; kernels may read it where a block table is padded."""

_FRESH, _USED = 1, 2


class BlockBook:
    """The blocks that each request holds, of the one cache group that KVPP serves.

    `num_blocks` and `block_size` (tokens) are those of vLLM's KV cache manager, whose ids these are; a kernel
    may see each of its blocks as several smaller ones.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[str, _Row] = {}
        self._marks = np.zeros(num_blocks, dtype=np.uint8)

    def step(self, scheduler_output: Any) -> tuple[Ids, Ids]:
        """Take in one output of the scheduler, and return the blocks that its step uses: ascending int64 ids.

        First those that hold computed tokens of the step's requests, shared ones once; then those that the step
        writes and that hold none, with the null block among them. Where the scheduler runs ahead of the
        device, it counts draft tokens as computed that may turn out wrong: then a block may be in the first list
        without holding anything yet. Every output has to be taken in, those without tokens too.

        Raises BlocksError if the output continues a request that was never begun.
        """
        self._forget(scheduler_output)
        bounds = list(self._bounds(scheduler_output))
        marks = self._marks
        marks.fill(0)
        marks[NULL_BLOCK] = _FRESH
        for row, computed, end in bounds:
            if end > computed:
                marks[row.ids[computed:end]] = _FRESH
        for row, computed, _ in bounds:
            marks[row.ids[:computed]] = _USED
        return np.flatnonzero(marks == _USED), np.flatnonzero(marks == _FRESH)

    def _forget(self, scheduler_output: Any) -> None:
        """Drop what requests held that have ended or lost their blocks."""
        for gone in (scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ()):
            for name in gone:
                self._held.pop(name, None)

    def _bounds(self, scheduler_output: Any) -> Iterator[tuple["_Row", int, int]]:
        """Every request of the step: its blocks, how many hold computed tokens, how many it has when it ends."""
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._held[new.req_id] = _Row(new.block_ids[0])
            yield self._bound(new.req_id, new.num_computed_tokens, scheduled)
        cached = scheduler_output.scheduled_cached_reqs
        for name, more, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._held[name] = _Row(more[0])
            elif name not in self._held:
                raise BlocksError(
                    f"The scheduler goes on with request {name!r}, and none of its outputs has begun it; KVPP "
                    "must be active before the first step. Restart the engine."
                )
            elif more is not None:
                self._held[name].extend(more[0])
            yield self._bound(name, computed, scheduled)

    def _bound(self, name: str, computed: int, scheduled: dict[str, int]) -> tuple["_Row", int, int]:
        size = self._block_size
        return self._held[name], -(-computed // size), -(-(computed + scheduled[name]) // size)


class _Row:
    """The blocks of one request, in order; `ids` are int64 and may have room behind the last one."""

    def __init__(self, ids: list[int]) -> None:
        self._all = np.array(ids, dtype=np.int64)
        self._count = len(ids)

    @property
    def ids(self) -> Ids:
        return self._all[: self._count]

    def extend(self, ids: list[int]) -> None:
        end = self._count + len(ids)
        if end > len(self._all):
            self._all = np.resize(self._all, 2 * end)
        self._all[self._count : end] = ids
        self._count = end

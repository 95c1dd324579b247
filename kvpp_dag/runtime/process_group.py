"""Transport over torch.distributed process groups of its own; bytes only."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from kvpp_dag.errors import DivergenceError, TransferError
from kvpp_dag.runtime.transport import as_bytes, piece_bounds

LARGE = 1 << 26
"""Bytes from which on a broadcast is spread over all groups of a transport; see docs/runtime.md."""


class ProcessGroupTransport:
    """Broadcasts within `group`, whose members are `ranks` (global), in group order.

    The group must serve nothing else, or its collectives could interleave with the engine's in
    different orders on different ranks. Its timeout, set where it is created, bounds every transfer.
    For device tensors it needs a backend of the device beside gloo, which serves `agree`: see
    `group_backend`. A broadcast of such a tensor is submitted to the current stream and returns.

    `more_groups` are like `group`, and made in the same order on every rank: a broadcast of `LARGE` bytes
    or more is cut into as many equal parts as there are groups, which travel at the same time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        *,
        more_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.group = group
        self.groups = (group, *more_groups)
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """The broadcast of `view` from group rank `owner`, split into pieces equal on all ranks."""
        flat = as_bytes(view, f"the cache sent by rank {owner}")
        if len(self.groups) > 1 and flat.numel() >= LARGE:
            return self._spread(flat, owner)
        pieces = tuple(flat[start:stop] for start, stop in piece_bounds(flat.numel()))
        source, group = self.ranks[owner], self.group

        def broadcast() -> None:
            try:
                for piece in pieces:
                    dist.broadcast(piece, source, group)
            except RuntimeError as error:
                raise self._failed(source, error) from error

        return broadcast

    def agree(self, token: bytes) -> None:
        """Compare `token` with every rank's by an all-gather of a few bytes."""
        gathered = gather_bytes(self.group, self.ranks, token)
        differing = [rank for rank, t in zip(self.ranks, gathered, strict=True) if t != token]
        if differing:
            raise DivergenceError(
                f"Rank {self.ranks[self.rank]} and ranks {differing} of one KVPP group do not run the "
                "same forward; every rank must see the same scheduler output and begin the same "
                "forwards."
            )

    def _spread(self, flat: torch.Tensor, owner: int) -> Callable[[], None]:
        """The broadcast of `flat` in parts, one per group; in pieces as well, if a part is too large."""
        source = self.ranks[owner]
        largest = -(-flat.numel() // len(self.groups))
        parts = [flat[start:stop] for start, stop in piece_bounds(flat.numel(), largest)]
        pieces = tuple(
            (part[start:stop], group)
            for part, group in zip(parts, self.groups, strict=True)
            for start, stop in piece_bounds(part.numel())
        )

        def broadcast() -> None:
            try:
                works = [dist.broadcast(piece, source, group, async_op=True) for piece, group in pieces]
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._failed(source, error) from error

        return broadcast

    def _failed(self, source: int, error: RuntimeError) -> TransferError:
        return TransferError(
            f"The broadcast from rank {source} in the group {self.ranks} failed: {error}. A "
            "peer has died, diverged or was slower than the group's timeout."
        )


def gather_bytes(group: dist.ProcessGroup, ranks: Sequence[int], content: bytes) -> list[bytes]:
    """What each of the `ranks` (global) of `group` gives as `content`, in group order; of one length everywhere.

    Raises TransferError if one of them does not come.
    """
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in ranks]
    try:
        dist.all_gather(gathered, mine, group)
    except RuntimeError as error:
        raise TransferError(
            f"The ranks {tuple(ranks)} could not compare their forwards: {error}. A peer has died, "
            "did not begin this forward, or was slower than the group's timeout."
        ) from error
    return [bytes(theirs.tolist()) for theirs in gathered]

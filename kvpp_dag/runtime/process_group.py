"""Transport over a torch.distributed process group of its own; bytes only."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from kvpp_dag.errors import DivergenceError, TransferError
from kvpp_dag.runtime.transport import as_bytes, piece_bounds


class ProcessGroupTransport:
    """Broadcasts within `group`, whose members are `ranks` (global), in group order.

    The group must serve nothing else, or its collectives could interleave with the engine's in
    different orders on different ranks. Its timeout, set where it is created, bounds every transfer.
    For device tensors it needs a backend of the device beside gloo, which serves `agree`: see
    `group_backend`. A broadcast of such a tensor is submitted to the current stream and returns.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self.group = group
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """The broadcast of `view` from group rank `owner`, split into pieces equal on all ranks."""
        flat = as_bytes(view, f"the cache sent by rank {owner}")
        pieces = tuple(flat[start:stop] for start, stop in piece_bounds(flat.numel()))
        source, group = self.ranks[owner], self.group

        def broadcast() -> None:
            try:
                for piece in pieces:
                    dist.broadcast(piece, source, group)
            except RuntimeError as error:
                raise TransferError(
                    f"The broadcast from rank {source} in the group {self.ranks} failed: {error}. A "
                    "peer has died, diverged or was slower than the group's timeout."
                ) from error

        return broadcast

    def agree(self, token: bytes) -> None:
        """Compare `token` with every rank's by an all-gather of a few bytes."""
        mine = torch.frombuffer(bytearray(token), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in self.ranks]
        try:
            dist.all_gather(gathered, mine, self.group)
        except RuntimeError as error:
            raise TransferError(
                f"The ranks {self.ranks} could not compare their forwards: {error}. A peer has died, "
                "did not begin this forward, or was slower than the group's timeout."
            ) from error
        differing = [
            rank for rank, t in zip(self.ranks, gathered, strict=True) if not torch.equal(t, mine)
        ]
        if differing:
            raise DivergenceError(
                f"Rank {self.ranks[self.rank]} and ranks {differing} of one KVPP group do not run the "
                "same forward; every rank must see the same scheduler output and begin the same "
                "forwards."
            )

"""What carries bytes from an owner to the other ranks of its group."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from kvpp_dag.errors import LayoutError

MAX_PIECE = 1 << 30
"""Bytes a single collective carries at most: counts past 2^31 overflow in some libraries."""


class Transport(Protocol):
    """The members of one KVPP group, seen from one of them."""

    rank: int
    size: int

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """Check `view` and return the broadcast of it from `owner`, to be called once a forward.

        Called on a transfer stream, it returns when the bytes of `view` have been sent (on the owner)
        or have arrived (elsewhere). Raises LayoutError for a view that is not contiguous; the call
        raises TransferError or DivergenceError.
        """

    def agree(self, token: bytes) -> None:
        """Raise DivergenceError unless every rank of the group calls this with an equal token."""


Ranges = Sequence[tuple[int, int]]
"""Bytes `start..stop` of a view, ascending."""


@runtime_checkable
class SendsRanges(Protocol):
    """A transport to which several ranges of a view are one broadcast, and hardly cost more than one."""

    def prepare_ranges(self, view: torch.Tensor, owner: int) -> Callable[[Ranges], None]:
        """As `Transport.prepare`, of the ranges of `view` that the call is given: some, the same on all ranks."""


def as_bytes(view: torch.Tensor, name: str = "the tensor") -> torch.Tensor:
    """`view` as flat uint8 over the same memory, so that any dtype travels bit for bit.

    Raises LayoutError, which is a ValueError, naming `name` and the strides if it is not contiguous.
    """
    if not view.is_contiguous():
        raise LayoutError(
            f"{name} of shape {tuple(view.shape)} has strides {view.stride()} and is not contiguous; "
            "a transfer needs one contiguous run of bytes."
        )
    return view.view(-1).view(torch.uint8)


def piece_bounds(nbytes: int, largest: int = MAX_PIECE) -> tuple[tuple[int, int], ...]:
    """Split `nbytes` bytes into `(start, stop)` pieces of at most `largest`, equal on every rank."""
    return tuple((start, min(start + largest, nbytes)) for start in range(0, nbytes, largest))

"""A transport that makes sure that every broadcast has arrived."""

import os
from collections.abc import Callable
from functools import partial

import torch

from kvpp_dag.errors import TransferError
from kvpp_dag.runtime.transport import Transport, as_bytes, piece_bounds

CANARY_BYTES = 16

LEAST_CANARY = 8
"""Bytes of the shortest piece that is judged: what is sent equals that many random bytes once in 2**64 times."""


class VerifyingTransport:
    """`inner`, with a canary in every receive buffer: one that is still there afterwards is an error.

    A broadcast that silently did nothing leaves the buffer of the layer before, and the outputs are wrong
    without a word. This puts random bytes at both ends of every piece that is to arrive, and looks for
    them afterwards. Looking makes the host wait for every transfer: use it to check an installation.

    A piece of less than LEAST_CANARY bytes is not judged: what arrives could be the canary by chance.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """The broadcast of `view`, which raises TransferError if a receiver's buffer stays as it was."""
        broadcast = self.inner.prepare(view, owner)
        if owner == self.rank:
            return broadcast
        flat = as_bytes(view)
        ends: list[torch.Tensor] = []
        for start, stop in piece_bounds(flat.numel()):
            piece = flat[start:stop]
            if piece.numel() >= LEAST_CANARY:
                ends += [piece[:CANARY_BYTES], piece[-CANARY_BYTES:]]
        return partial(_receive, broadcast, tuple(ends), owner, self.rank)

    def agree(self, token: bytes) -> None:
        """As `inner` does."""
        self.inner.agree(token)


def _receive(
    broadcast: Callable[[], None], ends: tuple[torch.Tensor, ...], owner: int, rank: int
) -> None:
    canary = torch.frombuffer(bytearray(os.urandom(CANARY_BYTES)), dtype=torch.uint8)
    for end in ends:
        end.copy_(canary[: end.numel()])
    broadcast()
    for end in ends:
        if torch.equal(end.cpu(), canary[: end.numel()]):
            raise TransferError(
                f"A broadcast from rank {owner} returned on rank {rank} without having changed the "
                f"{end.numel()} bytes of a canary in the receive buffer: the collective does nothing "
                "here. Check the communication library and its settings."
            )

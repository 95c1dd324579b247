"""Verify mode on a device: a broadcast that silently does nothing is an error (case 5)."""

from functools import partial

import torch

from kvpp_dag.errors import TransferError
from kvpp_dag.runtime import VerifyingTransport
from tests.device.ranks import Setting, reference, serve, serve_ranks
from tests.runtime_support import run_threads

GROWING = (0, 1, 2, 0, 1)


class Broken:
    """A transport whose broadcasts do nothing on rank 1 from the third on, as if it were disabled."""

    def __init__(self, inner):
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.sent = 0

    def prepare(self, view, owner):
        broadcast = self.inner.prepare(torch.empty_like(view), owner)  # keeps the other rank company
        right = self.inner.prepare(view, owner)

        def maybe():
            self.sent += 1
            (broadcast if self.sent > 2 and self.rank == 1 else right)()

        return maybe

    def agree(self, token):
        self.inner.agree(token)


def test_in_verify_mode_a_broadcast_that_does_nothing_is_an_error(device):
    setting = Setting(wrap=lambda transport: VerifyingTransport(Broken(transport)))
    work = partial(serve, device=device, layers=5, blocks=GROWING, setting=setting)
    _, error = run_threads(2, work, timeout=1.0)
    assert isinstance(error, TransferError)
    assert "without having changed the 16 bytes of a canary" in str(error)


def test_control_without_verify_mode_it_goes_unnoticed(device):
    served = serve_ranks(device, 2, 5, GROWING, Setting(wrap=Broken))
    assert served[1].outputs != reference(device, 5, GROWING).outputs


def test_verify_mode_lets_what_arrives_through(device):
    served = serve_ranks(device, 2, 5, GROWING, Setting(wrap=VerifyingTransport))
    expected = reference(device, 5, GROWING)
    assert [rank.outputs for rank in served] == [expected.outputs] * 2

"""Verify mode on host memory: a broadcast that does nothing is an error, any other goes through."""

import pytest
import torch

from kvpp_dag.errors import TransferError
from kvpp_dag.runtime import LocalGroup, VerifyingTransport
from tests.runtime_support import run_group
from tests.runtime_work import exchange, nan_payloads


class Disabled:
    """A transport whose broadcasts return at once."""

    rank, size = 1, 2

    def prepare(self, view, owner):
        return lambda: None

    def agree(self, token):
        raise ArithmeticError(token)


@pytest.mark.parametrize("nbytes", [8, 16, 17, 4096])
def test_a_broadcast_that_does_nothing_is_an_error_where_it_is_received(nbytes):
    view = torch.zeros(nbytes, dtype=torch.uint8)
    receive = VerifyingTransport(Disabled()).prepare(view, 0)
    with pytest.raises(TransferError, match="from rank 0 returned on rank 1 without having changed"):
        receive()


def test_a_broadcast_that_stops_halfway_is_an_error():
    class Half(Disabled):
        def prepare(self, view, owner):
            return lambda: view[: view.numel() // 2].fill_(1)

    with pytest.raises(TransferError, match="canary"):
        VerifyingTransport(Half()).prepare(torch.zeros(100, dtype=torch.uint8), 0)()


@pytest.mark.parametrize("nbytes", [1, 2, 7])
def test_a_piece_that_could_be_the_canary_by_chance_is_not_judged(nbytes, monkeypatch):
    monkeypatch.setattr("os.urandom", lambda count: b"\x05" * count)

    class Fives(Disabled):
        def prepare(self, view, owner):
            return lambda: view.fill_(5)

    VerifyingTransport(Fives()).prepare(torch.zeros(nbytes, dtype=torch.uint8), 0)()
    with pytest.raises(TransferError, match="the 8 bytes of a canary"):  # the control
        VerifyingTransport(Fives()).prepare(torch.zeros(8, dtype=torch.uint8), 0)()


def test_the_owner_has_no_canary():
    view = torch.arange(100, dtype=torch.uint8)
    VerifyingTransport(Disabled()).prepare(view, 1)()
    assert view.tolist() == list(range(100))


def verified(transport):
    return exchange(VerifyingTransport(transport), torch.float8_e5m2)


@pytest.mark.parametrize("kind", ["local", "gloo", "shared"])
def test_what_arrives_goes_through(kind):
    sent = bytes(nan_payloads(torch.float8_e5m2).view(torch.uint8).tolist())
    assert run_group(kind, 3, verified) == [sent] * 3


def test_the_ranks_still_compare_their_forwards():
    with pytest.raises(ArithmeticError):
        VerifyingTransport(Disabled()).agree(b"x")
    assert VerifyingTransport(LocalGroup(1).transport(0)).size == 1

"""Transports: bytes arrive as they were sent, and ranks that diverge get an error."""

import threading
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpp_dag.errors import ConfigError, DivergenceError, LayoutError, TransferError
from kvpp_dag.runtime import LocalGroup, ProcessGroupTransport, process_group
from kvpp_dag.runtime.transport import MAX_PIECE, as_bytes, piece_bounds
from tests.runtime_support import run_group, run_threads
from tests.runtime_work import (
    agree,
    exchange,
    exchange_in_pieces,
    exchange_over_groups,
    nan_payloads,
)

SOON = 20.0
KINDS = ["local", "gloo", "shared"]
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_travels_bit_for_bit(kind, dtype):
    sent = bytes(nan_payloads(dtype).view(torch.uint8).tolist())
    assert run_group(kind, 3, partial(exchange, dtype=dtype)) == [sent] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_broadcast_nothing_arrives(kind):
    sender, *others = run_group(kind, 3, partial(exchange, dtype=torch.uint8, send=False))
    assert all(other != sender for other in others)


def test_the_payloads_hold_nans_that_arithmetic_would_change():
    for dtype in DTYPES[1:]:
        payload = nan_payloads(dtype)
        assert bool(payload.float().isnan().any())
    fp8 = nan_payloads(torch.float8_e5m2)
    assert as_bytes(fp8.float().to(torch.float8_e5m2)).tolist() != as_bytes(fp8).tolist()


def test_a_broadcast_in_pieces_arrives_whole():
    sent = bytes(nan_payloads(torch.uint8).tolist())
    assert run_group("gloo", 2, partial(exchange_in_pieces, largest=100)) == [sent] * 2


@pytest.mark.parametrize("groups", [2, 4])
def test_a_large_broadcast_over_several_groups_arrives_whole(groups):
    sent = bytes(nan_payloads(torch.uint8).tolist())
    work = partial(exchange_over_groups, groups=groups, large=1)
    assert run_group("gloo", 3, work) == [sent] * 3


@pytest.fixture
def parts_sent(monkeypatch):
    """Lists group, bytes and whether it returned at once, of the parts that are broadcast."""
    sent, waited = [], []

    class Work:
        def wait(self):
            waited.append(len(sent))

    def broadcast(piece, source, group, async_op=False):
        sent.append((group, piece.numel(), async_op))
        return Work()

    monkeypatch.setattr(process_group.dist, "get_rank", lambda: 6)
    monkeypatch.setattr(process_group.dist, "broadcast", broadcast)
    return sent, waited


@pytest.mark.parametrize("owner", [0, 1])
def test_only_what_is_large_is_spread_and_all_parts_are_on_their_way_before_any_is_waited_for(
    parts_sent, owner
):
    sent, waited = parts_sent
    transport = ProcessGroupTransport("a", [4, 6], more_groups=("b", "c", "d"))
    large = torch.empty(process_group.LARGE + 2, dtype=torch.uint8, device="meta")
    transport.prepare(large[:-3], owner)()
    assert sent == [("a", process_group.LARGE - 1, False)]
    sent.clear()
    transport.prepare(large, owner)()
    part = process_group.LARGE // 4 + 1
    assert sent == [("a", part, True), ("b", part, True), ("c", part, True), ("d", part - 2, True)]
    assert waited == [4] * 4


def test_parts_that_are_too_large_are_sent_in_pieces(parts_sent):
    sent, _ = parts_sent
    view = torch.empty(5 * MAX_PIECE, dtype=torch.uint8, device="meta")
    ProcessGroupTransport("a", [4, 6], more_groups=("b",)).prepare(view, 0)()
    half = MAX_PIECE // 2
    assert [(g, n) for g, n, _ in sent] == [
        (group, nbytes) for group in "ab" for nbytes in (MAX_PIECE, MAX_PIECE, half)
    ]


@pytest.fixture
def sizes_sent(monkeypatch):
    """Lets a process group transport exist without a group; lists the sizes that it broadcasts."""
    sent = []
    monkeypatch.setattr(process_group.dist, "get_rank", lambda: 6)
    monkeypatch.setattr(
        process_group.dist,
        "broadcast",
        lambda piece, source, group: sent.append((piece.numel(), source)),
    )
    return sent


def test_three_gib_are_split_alike_on_every_rank_without_allocating(sizes_sent):
    gib = 1 << 30
    view = torch.empty(3 * gib, dtype=torch.uint8, device="meta")
    for owner in (0, 1):  # rank 6 is group rank 1: once it receives, once it sends
        sizes_sent.clear()
        ProcessGroupTransport(None, [4, 6]).prepare(view, owner)()
        assert sizes_sent == [(gib, [4, 6][owner])] * 3


@given(nbytes=st.integers(0, 10**6), largest=st.integers(1, 10**6))
def test_pieces_cover_everything_once_and_none_is_too_large(nbytes, largest):
    largest = max(largest, nbytes // 1000 + 1)
    pieces = piece_bounds(nbytes, largest)
    assert [start for start, _ in pieces] == [0, *[stop for _, stop in pieces[:-1]]][: len(pieces)]
    assert (pieces[-1][1] if pieces else 0) == nbytes
    assert all(0 < stop - start <= largest for start, stop in pieces)


def test_pieces_of_a_transfer_stay_below_two_gib():
    assert MAX_PIECE < 1 << 31
    assert piece_bounds(5 * MAX_PIECE // 2) == (
        (0, MAX_PIECE),
        (MAX_PIECE, 2 * MAX_PIECE),
        (2 * MAX_PIECE, 5 * MAX_PIECE // 2),
    )


def transports():
    yield LocalGroup(2).transport(1)
    yield ProcessGroupTransport(None, [4, 6])


@pytest.mark.usefixtures("sizes_sent")
def test_a_strided_view_is_a_value_error_with_owner_and_strides():
    strided = torch.zeros(8, 6, dtype=torch.uint8)[:, :3]
    for transport in transports():
        with pytest.raises(ValueError, match=r"sent by rank 0 .*strides \(6, 1\)") as caught:
            transport.prepare(strided, 0)
        assert isinstance(caught.value, LayoutError)
        transport.prepare(strided.contiguous(), 0)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 0)])
def test_as_bytes_shares_memory(shape):
    tensor = torch.zeros(shape, dtype=torch.float32)
    flat = as_bytes(tensor)
    assert flat.shape == (tensor.nbytes,)
    assert flat.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_tokens_agree(kind):
    assert run_group(kind, 3, partial(agree, tokens=[b"same"] * 3)) == [None] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_different_tokens_are_a_divergence_on_every_rank(kind):
    results = run_group(kind, 3, partial(agree, tokens=[b"same", b"same", b"nope"]))
    assert [type(result) for result in results] == [DivergenceError] * 3


def test_local_ranks_that_meet_with_different_collectives_diverge():
    def work(transport):
        nbytes = 8 + 8 * (transport.rank == 1)
        transport.prepare(torch.zeros(nbytes, dtype=torch.uint8), 0)()

    results = run_threads(2, work)
    assert [type(result) for result in results] == [DivergenceError] * 2


def test_a_local_owner_stays_until_everybody_has_read_its_memory():
    group, gate, left = LocalGroup(2, timeout=SOON), threading.Event(), threading.Event()
    what, source = ("broadcast", 8), torch.zeros(8, dtype=torch.uint8)

    def own():
        group.meet(rank=0, sequence=1, what=what, source=source, take=None)
        left.set()

    def read():
        group.meet(rank=1, sequence=1, what=what, source=None, take=lambda _: gate.wait(SOON))

    threads = [threading.Thread(target=part, daemon=True) for part in (own, read)]
    for thread in threads:
        thread.start()
    assert not left.wait(0.1)
    gate.set()
    assert left.wait(SOON)
    for thread in threads:
        thread.join(SOON)


def test_a_local_rank_that_is_alone_gives_up():
    group = LocalGroup(2, timeout=0.05)
    with pytest.raises(TransferError, match=r"only ranks \[1\] joined"):
        group.transport(1).agree(b"x")
    with pytest.raises(TransferError):
        group.transport(0).agree(b"x")  # too late


def outcomes(group, work):
    """What `work(transport)` raises on the ranks of a local group."""
    errors = [None] * group.size

    def run(rank):
        try:
            work(group.transport(rank))
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(group.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_after_a_timeout_every_rank_hears_of_the_timeout_and_not_of_a_divergence():
    """Both ranks that came run the same forward; the third is missing, or comes too late."""
    group = LocalGroup(3, timeout=0.2)
    errors = outcomes(group, lambda transport: transport.rank == 2 or transport.agree(b"same"))
    assert [type(error) for error in errors] == [TransferError, TransferError, type(None)]
    assert all("waited 0.2 s and only ranks [0, 1] joined" in str(error) for error in errors[:2])
    with pytest.raises(TransferError, match=r"only ranks \[0, 1\] joined") as late:
        group.transport(2).agree(b"same")
    assert type(late.value) is TransferError


def test_a_rank_that_cannot_take_what_was_sent_fails_and_tells_the_others_why():
    def work(transport):
        take = None if transport.rank == 0 else lambda _: 1 / 0
        source = torch.zeros(8, dtype=torch.uint8) if transport.rank == 0 else None
        group.meet(rank=transport.rank, sequence=1, what=("broadcast", 8), source=source, take=take)

    group = LocalGroup(2, timeout=SOON)
    owner, reader = outcomes(group, work)
    assert isinstance(reader, ZeroDivisionError)
    assert type(owner) is TransferError
    assert "rank 1 failed: division by zero" in str(owner)


def test_a_local_group_forgets_a_collective_once_every_rank_has_left_it():
    group = LocalGroup(2, timeout=0.05)
    outcomes(group, lambda transport: transport.agree(bytes([transport.rank])))
    assert not group._meetings  # diverged
    with pytest.raises(TransferError):
        group.transport(0).agree(b"x")
    assert group._meetings  # rank 1 can still come, and must not wait for rank 0
    with pytest.raises(TransferError):
        group.transport(1).agree(b"x")
    assert not group._meetings


def test_local_groups_and_ranks_are_checked():
    with pytest.raises(ConfigError, match="at least one"):
        LocalGroup(0)
    for rank in (-1, 2):
        with pytest.raises(ConfigError, match=f"Rank {rank} "):
            LocalGroup(2).transport(rank)


def test_a_local_group_of_one_sends_to_nobody():
    transport = LocalGroup(1).transport(0)
    view = torch.arange(8, dtype=torch.uint8)
    transport.prepare(view, 0)()
    transport.agree(b"x")
    assert view.tolist() == list(range(8))

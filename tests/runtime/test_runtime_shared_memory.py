"""Shared memory between ranks of one host: one copy each, and every view that cannot be sent is refused."""

import errno
import os
import threading
from functools import partial

import pytest
import torch

from kvpp_dag.errors import (
    CapacityError,
    ConfigError,
    DivergenceError,
    LayoutError,
)
from kvpp_dag.runtime import VerifyingTransport, links, segments, shared_memory
from tests.runtime.shared_support import SOON, filled, open_files, run_ranks
from tests.runtime_support import reference, run_group
from tests.runtime_work import serve


def test_owners_take_turns_and_views_lie_anywhere_in_their_memory():
    def work(transport):
        memory = filled(transport, 10_000, transport.rank)
        own = memory[123:5123]
        arrived = torch.full((7000,), 99, dtype=torch.uint8)
        seen = []
        for owner in (0, 1, 2, 1):
            view = own if owner == transport.rank else arrived[1000:6000]
            transport.prepare(view, owner)()
            seen.append(view.unique().tolist())
        return seen, arrived[:1000].unique().tolist(), arrived[6000:].unique().tolist()

    assert run_ranks(3, work) == [([[0], [1], [2], [1]], [99], [99])] * 3


def test_every_broadcast_carries_what_the_owner_has_written_since():
    def work(transport):
        view = filled(transport, 64, 0)
        call = transport.prepare(view, 0)
        seen = []
        for value in range(5):
            if transport.rank == 0:
                view.fill_(value)
            call()
            seen.append(view[63].item())
        return seen

    assert run_ranks(2, work) == [[0, 1, 2, 3, 4]] * 2


def test_ranges_of_a_view_arrive_in_their_places_and_nothing_beside_them():
    ranges = [(0, 3), (7, 8), (60, 64)]
    inside = {place for start, stop in ranges for place in range(start, stop)}

    def work(transport):
        memory = filled(transport, 100, transport.rank)
        transport.prepare_ranges(memory[20:84], 1)(ranges)
        return memory.tolist()

    expected = [int(place - 20 in inside) for place in range(100)]
    assert run_ranks(3, work) == [expected, [1] * 100, [2 * (e != 1) + e for e in expected]]


def test_ranges_of_different_lengths_are_a_divergence_on_both_ends():
    def work(transport):
        memory = filled(transport, 100, transport.rank)
        transport.prepare_ranges(memory, 0)([(0, 5 + transport.rank)])

    for error in run_ranks(2, work):
        assert isinstance(error, DivergenceError)
        assert "5 bytes" in str(error)
        assert "6 bytes" in str(error)


@pytest.mark.parametrize("outside", [(-1, 2), (60, 65), (9, 8)])
def test_a_range_outside_the_view_is_refused_before_anything_is_sent(outside):
    def work(transport):
        send = transport.prepare_ranges(filled(transport, 100, transport.rank)[20:84], 0)
        with pytest.raises(LayoutError, match="of a view of 64 bytes"):
            send([(0, 1), outside])
        send([(0, 1)])  # the group can still be used

    assert run_ranks(2, work) == [None, None]


def test_a_segment_is_passed_on_and_mapped_once(monkeypatch):
    mapped = []
    original = segments.map_segment
    monkeypatch.setattr(shared_memory, "map_segment", lambda file: mapped.append(file) or original(file))

    def work(transport):
        halves = filled(transport, 100, 1).view(2, 50)
        calls = [transport.prepare(half, 0) for half in halves]
        for call in calls * 10:
            call()

    assert run_ranks(3, work) == [None] * 3
    assert len(mapped) == 2  # one a reader


def test_the_owner_stays_until_every_reader_has_copied(monkeypatch):
    copied, gate, left = [], threading.Event(), threading.Event()
    original = shared_memory._copy

    def slow(*args):
        assert gate.wait(SOON)
        original(*args)
        copied.append(left.is_set())

    monkeypatch.setattr(shared_memory, "_copy", slow)

    def work(transport):
        view = filled(transport, 8, transport.rank)
        transport.prepare(view, 0)()
        if transport.rank == 0:
            left.set()

    waiter = threading.Timer(0.2, gate.set)
    waiter.start()
    assert run_ranks(3, work) == [None] * 3
    waiter.join()
    assert copied == [False, False]


def test_nothing_is_allocated_for_three_gib_and_they_arrive_in_their_place(monkeypatch):
    """Sizes and offsets past 2^32: memory that is reserved but never touched, and a copy that only takes note."""
    gib, copies = 1 << 30, []
    monkeypatch.setattr(
        segments.os, "posix_fallocate", lambda file, _, nbytes: os.ftruncate(file, nbytes)
    )
    monkeypatch.setattr(segments.mmap, "MAP_POPULATE", 0)
    monkeypatch.setattr(shared_memory.ctypes, "memmove", lambda *args: copies.append(args))
    bases = {}

    def work(transport):
        memory = transport.allocate(9 * gib)
        bases[transport.rank] = memory.data_ptr()
        transport.prepare(memory[5 * gib : 8 * gib], 0)()
        return transport._mapped[0, 0].data_ptr() if transport.rank == 1 else None

    _, mapped = run_ranks(2, work)
    assert copies == [(bases[1] + 5 * gib, mapped + 5 * gib, 3 * gib)]


def test_an_empty_view_is_sent_by_sending_nothing():
    def work(transport):
        transport.prepare(transport.allocate(0), 0)()
        return transport._sequence

    assert run_ranks(2, work) == [0, 0]


def test_a_group_of_one_sends_to_nobody():
    def work(transport):
        view = filled(transport, 8, 3)
        transport.prepare(view, 0)()
        transport.agree(b"x")
        return view.tolist()

    assert run_ranks(1, work) == [[3] * 8]


def test_verify_mode_goes_through():
    def work(transport):
        view = filled(transport, 100, 7 - transport.rank)
        VerifyingTransport(transport).prepare(view, 0)()
        return view.unique().tolist()

    assert run_ranks(3, work) == [[7]] * 3


def test_verify_mode_notices_a_copy_that_does_nothing(monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(shared_memory, "_copy", lambda *args: None)

    def work(transport):
        VerifyingTransport(transport).prepare(filled(transport, 100, 7), 0)()

    owner, reader = run_ranks(2, work)
    assert owner is None
    assert "canary" in str(reader)


# Forwards


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_forwards_over_shared_memory_are_those_of_one_rank_and_the_controls_are_not(ranks):
    blocks = (0, 1, 0, 1, 2)
    outputs, caches = reference(6, blocks)
    served = run_group("shared", ranks, partial(serve, layers=6, blocks=blocks))
    assert [rank.outputs for rank in served] == [outputs] * ranks
    assert {i: b for rank in served for i, b in rank.owned.items()} == caches
    for rank in run_group(
        "shared", ranks, partial(serve, layers=6, blocks=blocks, skip_broadcasts=True)
    ):
        equal = [a == b for a, b in zip(rank.outputs, outputs, strict=True)]
        assert equal == [block == 0 for block in blocks]


# What is refused


def test_an_owners_view_outside_shared_memory_is_refused_with_what_to_change():
    def work(transport):
        memory = transport.allocate(64)
        for view in (
            torch.zeros(8, dtype=torch.uint8),
            torch.empty(8, dtype=torch.uint8, device="meta"),
        ):
            with pytest.raises(LayoutError, match=r"rank 10 \(8 bytes on (cpu|meta)\) is not in shared"):
                transport.prepare(view, transport.rank)
        with pytest.raises(LayoutError, match=r"strides \(8, 1\)"):
            transport.prepare(memory.view(8, 8)[:, :4], transport.rank)
        transport.prepare(memory[56:], transport.rank)

    assert run_ranks(1, work) == [None]


def test_a_view_that_only_begins_in_shared_memory_is_refused():
    owned = segments.Segments()
    memory = owned.allocate(4096)
    longer = torch.empty(0, dtype=torch.uint8)
    longer.set_(memory.untyped_storage(), 4000, (96,))
    assert owned.find(longer, "x") == segments.Place(segment=0, offset=4000, nbytes=96)

    class Longer:
        device = memory.device

        def data_ptr(self):
            return memory.data_ptr() + 4000

        def numel(self):
            return 97

    with pytest.raises(LayoutError, match="97 bytes"):
        owned.find(Longer(), "x")
    owned.close()


def test_a_reader_on_another_device_is_refused():
    def work(transport):
        with pytest.raises(LayoutError, match="arrive on meta"):
            transport.prepare(torch.empty(8, dtype=torch.uint8, device="meta"), 1 - transport.rank)

    assert run_ranks(2, work) == [None] * 2


def test_a_host_without_memory_for_a_segment_is_a_capacity_error(monkeypatch):
    def full(file, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left")

    owned, before = segments.Segments(), open_files()
    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match="segment of 4096 bytes could not be made"):
        owned.allocate(4096)
    assert open_files() == before


def test_other_systems_are_refused_with_what_to_change(monkeypatch):
    monkeypatch.setattr(segments.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux.*process_group"):
        segments.Segments().allocate(8)
    with pytest.raises(ConfigError, match=r"need Linux.*process_group"):
        links.connect(lambda content: [content], rank=0, names=["rank 0"], meshes=1, timeout=1)
    assert links.host_identity() != links.host_identity()

"""Shared memory between ranks of one host: one copy each, typed errors, and nothing left behind.

Ranks are threads where only the protocol matters, and processes where one of them dies.
"""

import errno
import gc
import mmap
import os
import re
import signal
import socket
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from kvpp_dag.errors import (
    CapacityError,
    ConfigError,
    DivergenceError,
    KvppError,
    LayoutError,
    TransferError,
)
from kvpp_dag.runtime import SharedMemoryTransport, VerifyingTransport, links, segments, shared_memory
from tests.runtime_support import Died, reference, run_group, run_processes
from tests.runtime_work import serve

SOON = 20.0
PATIENT = 300.0
"""A timeout that no test waits for: what fails under it has noticed a death, not run out of time."""


class Exchange:
    """What ranks that are threads gather through."""

    def __init__(self, size):
        self._given = [b""] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank):
        def exchange(content):
            self._given[rank] = content
            self._barrier.wait(SOON)
            return list(self._given)

        return exchange


def run_ranks(size, work, *, timeout=SOON, before=lambda rank: None):
    """Run `work(transport)` on ranks that are threads; an exception takes the place of a result."""
    exchange, results = Exchange(size), [None] * size

    def run(rank):
        transport = None
        try:
            before(rank)
            transport = SharedMemoryTransport(
                exchange.of(rank), rank=rank, ranks=range(10, 10 + size), timeout=timeout
            )
            results[rank] = work(transport)
        except KvppError as error:
            results[rank] = error
        finally:
            if transport is not None:
                transport.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def filled(transport, nbytes, value):
    return transport.allocate(nbytes).fill_(value)


# Broadcasts


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


# Ranks that diverge


def test_different_sizes_are_a_divergence_on_both_ends():
    def work(transport):
        nbytes = 8 * (1 + transport.rank)
        transport.prepare(filled(transport, nbytes, 1), 0)()

    owner, reader = run_ranks(2, work)
    assert isinstance(owner, DivergenceError)
    assert isinstance(reader, DivergenceError)
    assert "16 bytes" in str(owner)
    assert "8 bytes" in str(reader)


def test_two_owners_of_one_broadcast_are_a_divergence_on_both_ends():
    def work(transport):
        transport.prepare(filled(transport, 8, 1), transport.rank)()

    assert [type(result) for result in run_ranks(2, work)] == [DivergenceError] * 2


def test_ranks_that_compare_different_tokens_can_still_compare_equal_ones():
    def work(transport):
        with pytest.raises(DivergenceError, match=r"ranks \[.*\] of one KVPP group"):
            transport.agree(bytes([transport.rank]))
        transport.agree(b"same")
        transport.agree(b"of any length" * 100)

    assert run_ranks(3, work) == [None] * 3


def test_comparing_and_broadcasting_may_run_on_two_threads():
    def work(transport):
        call = transport.prepare(filled(transport, 100_000, 1 + transport.rank), 0)
        control = threading.Thread(
            target=lambda: [transport.agree(b"x") for _ in range(200)], daemon=True
        )
        control.start()
        for _ in range(200):
            call()
        control.join(SOON)
        return control.is_alive()

    assert run_ranks(2, work) == [False, False]


# Peers that do not come


@pytest.mark.parametrize("absent", [0, 1])
def test_a_peer_that_does_not_come_is_an_error_that_names_it(absent):
    gone = threading.Event()

    def work(transport):
        call = transport.prepare(filled(transport, 8, 1), 0)
        if transport.rank == absent:
            assert gone.wait(SOON)
            call()  # too late: the other one has given up
        try:
            call()
        except TransferError as error:
            first = str(error)
        gone.set()
        with pytest.raises(TransferError, match="earlier collective failed"):
            call()
        with pytest.raises(TransferError, match="earlier collective failed"):
            transport.agree(b"x")
        return first

    results = run_ranks(2, work, timeout=0.3)
    assert f"The peer rank {10 + absent} did not come within the timeout" in results[1 - absent]
    assert isinstance(results[absent], TransferError)
    assert f"The peer rank {11 - absent} is gone" in str(results[absent])


def test_memory_that_does_not_arrive_is_an_error_on_both_ends():
    def work(transport):
        call = transport.prepare(filled(transport, 8, 1), 0)
        call()
        transport._mapped.clear()  # as if the open file had been dropped on its way
        call()

    owner, reader = run_ranks(2, work)
    assert "raise ulimit -n" in str(reader)
    assert "rank 11 is gone" in str(owner)
    assert [type(result) for result in (owner, reader)] == [TransferError] * 2


def test_whatever_else_fails_in_a_broadcast_reaches_both_ends(monkeypatch):
    def broken(file):
        os.close(file)
        raise OSError(errno.ENOMEM, "no room to map")

    monkeypatch.setattr(shared_memory, "map_segment", broken)

    def work(transport):
        transport.prepare(filled(transport, 8, 1), 0)()

    owner, reader = run_ranks(2, work)
    assert "no room to map" in str(reader)
    assert "rank 11 is gone" in str(owner)


def test_waiting_uses_no_core():
    def work(transport):
        call = transport.prepare(filled(transport, 8, 1), 0)
        if transport.rank == 0:
            time.sleep(1)
        started = time.thread_time()
        call()
        return time.thread_time() - started

    _, reader = run_ranks(2, work)
    assert reader < 0.2


def left_by(folder):
    """Inodes of the memory that the ranks had noted down before they died."""
    notes = "\n".join(path.read_text() for path in Path(folder).iterdir())
    return {int(i) for i in re.findall(r"inode (\d+)", notes)}


def memory_in_use():
    """Inodes of kvpp's segments that any process of this machine has mapped or open."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for line in (process / "maps").read_text().splitlines():
                if "memfd:kvpp" in line:
                    inodes.add(int(line.split()[4]))
            for file in (process / "fd").iterdir():
                if "memfd:kvpp" in os.readlink(file):
                    inodes.add(file.stat().st_ino)
        except OSError:
            continue  # it has ended, or is another user's
    return inodes


def die_in_a_broadcast(transport, dying, folder):
    """Broadcast from rank 0 and from rank 1; then the `dying` ranks kill themselves, and the rest find out."""
    view = filled(transport, 1 << 20, transport.rank)
    other = filled(transport, 1 << 20, transport.rank)
    for owner in (0, 1):
        transport.prepare(other, owner)()
    inodes = memory_in_use_here()
    assert len(inodes) == 2 + len({0, 1} - {transport.rank})  # two of its own, one of each owner
    Path(folder, str(transport.rank)).write_text("".join(f"inode {i}\n" for i in inodes))
    transport.agree(b"noted down")
    if transport.rank in dying:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for owner in range(transport.size):
            transport.prepare(view, owner)()
    except TransferError as error:
        return str(error)
    raise AssertionError("nobody noticed")


def memory_in_use_here():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:kvpp" in line}


@pytest.mark.parametrize("dying", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_ranks_killed_leave_nothing_behind_and_the_rest_notice_at_once(dying, tmp_path):
    files = set(os.listdir("/dev/shm"))
    work = partial(die_in_a_broadcast, dying=dying, folder=str(tmp_path))
    results = run_processes(3, work, timeout=PATIENT, kind="shared")
    for rank, result in enumerate(results):
        if rank in dying:
            assert isinstance(result, Died)
            assert result.args == (-signal.SIGKILL,)
        else:
            assert isinstance(result, str), result
            assert "is gone" in result
    noted = left_by(tmp_path)
    assert len(noted) == 6
    assert not noted & memory_in_use()
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "kvpp" in name]


def test_the_search_for_memory_finds_what_is_there():
    """The control of the test above."""
    others = memory_in_use_here()
    owned = segments.Segments()
    owned.allocate(4096)
    mine = memory_in_use_here() - others
    assert len(mine) == 1
    assert mine <= memory_in_use()
    owned.close()
    del owned
    gc.collect()
    assert not mine & memory_in_use()


# What a segment is


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_is_nameless_private_sealed_and_zeroed():
    owned = segments.Segments()
    memory = owned.allocate(10_000)
    file = owned.file(0)
    assert memory.shape == (10_000,)
    assert not bool(memory.any())
    assert os.fstat(file).st_mode & 0o777 == 0o600
    assert os.fstat(file).st_nlink == 0
    assert not os.get_inheritable(file)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(file, 10_000)
    with pytest.raises(PermissionError):
        os.write(file, b"x")
    memory.fill_(3)  # the owner still can
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = segments.map_segment(os.dup(file))
    assert bool((mapped == 3).all())
    owned.close()


def test_memory_outlives_the_list_of_segments_and_goes_with_its_last_tensor():
    others = memory_in_use_here()
    owned = segments.Segments()
    memory = owned.allocate(4096)
    view = memory[100:200].fill_(5)
    mine = memory_in_use_here() - others
    owned.close()
    del owned, memory
    gc.collect()
    assert view.unique().tolist() == [5]
    assert len(mine) == 1
    assert mine <= memory_in_use_here()
    del view
    gc.collect()
    assert not mine & memory_in_use_here()


def test_closing_gives_all_files_back():
    def work(transport):
        transport.prepare(filled(transport, 100, 1), 0)()

    run_ranks(3, work)
    gc.collect()
    before = open_files()
    for _ in range(3):
        run_ranks(3, work)
    gc.collect()
    assert open_files() == before


# Strangers


def test_who_does_not_know_the_secret_is_not_let_in():
    called = threading.Event()

    class Watched(Exchange):
        def of(self, rank):
            exchange = super().of(rank)

            def and_call(content):
                told = exchange(content)
                if rank == 1:
                    for hello in (b"", b"x", b"\0" * links._HELLO.size):
                        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                        stranger.connect(b"\0kvpp-" + told[0][:-16])
                        stranger.sendall(hello)
                        stranger.close()
                    called.set()
                return told

            return and_call

    exchange, results = Watched(2), [None, None]

    def run(rank):
        (mesh,) = links.connect(
            exchange.of(rank), rank=rank, names=["rank 0", "rank 1"], meshes=1, timeout=SOON
        )
        mesh[1 - rank].send(b"from %d" % rank)
        results[rank] = mesh[1 - rank].receive(6)
        mesh[1 - rank].close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert called.is_set()
    assert results == [(b"from 1", None), (b"from 0", None)]


def test_a_rank_that_never_calls_is_named():
    with pytest.raises(TransferError, match="rank 0 could not link up with rank 1 on this host"):
        links.connect(
            lambda content: [content, content],
            rank=0,
            names=["rank 0", "rank 1"],
            meshes=2,
            timeout=0.2,
        )


def test_an_address_out_of_reach_says_what_to_set():
    with pytest.raises(TransferError, match=r"link up with rank 0 .*set the transport to process_group"):
        links.connect(
            lambda content: [b"f" * len(content), content],
            rank=1,
            names=["rank 0", "rank 1"],
            meshes=1,
            timeout=5,
        )


def identity(transport):
    return links.host_identity()


def test_processes_of_one_host_know_that_they_are():
    first, second = run_processes(2, identity)
    assert first == second == links.host_identity()
    assert len(first) == 32

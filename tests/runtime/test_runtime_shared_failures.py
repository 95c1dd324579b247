"""Shared memory between ranks that diverge, do not come or die: typed errors on both ends, and nothing left behind."""

import errno
import gc
import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from kvpp_dag.errors import (
    DivergenceError,
    TransferError,
)
from kvpp_dag.runtime import segments, shared_memory
from tests.runtime.shared_support import PATIENT, SOON, filled, memory_in_use_here, run_ranks
from tests.runtime_support import Died, run_processes

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

"""Who may link up, and what it says where ranks cannot."""

import socket
import threading

import pytest

from kvpp_dag.errors import (
    TransferError,
)
from kvpp_dag.runtime import links
from tests.runtime.shared_support import SOON, Exchange
from tests.runtime_support import run_processes


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


@pytest.mark.parametrize("hello", [b"", b"x"])
def test_a_stranger_that_says_nothing_does_not_keep_the_peers_waiting(hello, monkeypatch):
    monkeypatch.setattr(links, "_HELLO_SECONDS", 0.1)
    strangers, results = [], [None, None]

    class Watched(Exchange):
        def of(self, rank):
            exchange = super().of(rank)

            def and_call(content):
                told = exchange(content)
                if rank == 1:  # before it dials rank 0 itself
                    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    stranger.connect(b"\0kvpp-" + told[0][:-16])
                    stranger.sendall(hello)
                    strangers.append(stranger)  # it stays open
                return told

            return and_call

    exchange = Watched(2)

    def run(rank):
        (mesh,) = links.connect(
            exchange.of(rank), rank=rank, names=["rank 0", "rank 1"], meshes=1, timeout=SOON
        )
        results[rank] = sorted(mesh)
        mesh[1 - rank].close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON / 4)
    assert results == [[1], [0]]
    strangers[0].close()


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

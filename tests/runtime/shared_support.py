"""Ranks that are threads and share memory, where only the protocol matters."""

import os
import threading
from pathlib import Path

from kvpp_dag.errors import KvppError
from kvpp_dag.runtime import SharedMemoryTransport

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


def memory_in_use_here():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:kvpp" in line}


def open_files():
    return len(os.listdir("/proc/self/fd"))

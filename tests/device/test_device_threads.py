"""One host thread submits everything that a device does for KVPP: the order of collectives is that thread's."""

import threading

import pytest

from kvpp_dag.check_device import run_ranks
from kvpp_dag.graph import Policy
from kvpp_dag.runtime.payload import Way
from tests.device.ranks import Setting, serve
from tests.runtime_support import make_engine, small_plan

LAYERS, BLOCKS = 5, (0, 1, 2, 6, 0, 1)


class Noting:
    """A transport that notes which threads broadcast and which compare."""

    def __init__(self, inner):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.broadcasting, self.comparing = [], []

    def prepare(self, view, owner):
        broadcast = self.inner.prepare(view, owner)

        def noted():
            self.broadcasting.append(threading.get_ident())
            broadcast()

        return noted

    def agree(self, token):
        self.comparing.append(threading.get_ident())
        self.inner.agree(token)


def threads_of(device, setting):
    """Of each rank: the engine's thread, and those that broadcast and compare."""

    def work(transport):
        noting = Noting(transport)
        serve(noting, device, LAYERS, BLOCKS, setting)
        return threading.get_ident(), set(noting.broadcasting), set(noting.comparing)

    return run_ranks(2, work)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("way", [Way.FULL, Way.RUNS, Way.PACKED])
def test_the_engines_thread_submits_every_broadcast_and_another_only_compares(device, way, policy):
    for engine, broadcasting, comparing in threads_of(device, Setting(way=way, policy=policy)):
        assert broadcasting == {engine}
        assert len(comparing) == 1
        assert engine not in comparing


def test_after_a_failed_forward_the_rest_is_submitted_by_that_thread_too(device):
    setting = Setting(fail={0: (2, 1)})
    for engine, broadcasting, _ in threads_of(device, setting):
        assert broadcasting == {engine}


def test_control_on_streams_of_the_host_another_thread_broadcasts():
    """There the transfer stream is a thread, and the notes show it."""

    def work(transport):
        noting = Noting(transport)
        make_engine(small_plan(LAYERS, 2), noting).run(0, 1)
        return threading.get_ident(), set(noting.broadcasting)

    for engine, broadcasting in run_ranks(2, work):
        assert len(broadcasting) == 1
        assert engine not in broadcasting

"""Forwards of several ranks on a device: right to the bit under any delay, and wrong without the waits."""

import gc
import threading
from functools import partial

import pytest
import torch

from kvpp_dag.errors import TransferError
from kvpp_dag.graph import COMPUTE_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.runtime import Completion, LocalGroup
from tests.device.ranks import Alone, DeviceEngine, Setting, one_rank, reference, serve_ranks
from tests.runtime_support import run_threads, small_plan

GROWING = (0, 1, 2, 0, 1, 2, 3)
DELAYS = {
    "no delay": {},
    "slow compute": {"compute_delay": 0.003},
    "slow transfers": {"transfer_delay": 0.003},
}


def check(served, expected):
    for rank in served:
        assert rank.outputs == expected.outputs
        assert rank.owned == {ordinal: expected.owned[ordinal] for ordinal in rank.owned}
    assert sorted(i for rank in served for i in rank.owned) == sorted(expected.owned)


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(("layers", "ranks"), [(5, 2), (7, 3), (2, 3)])
def test_several_ranks_compute_what_one_rank_computes(device, layers, ranks, policy, delay):
    setting = Setting(policy=policy, **delay)
    check(serve_ranks(device, ranks, layers, GROWING, setting), reference(device, layers, GROWING))


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize("depth", [2, 3, 9])
@pytest.mark.parametrize("policy", list(Policy))
def test_any_prefetch_depth(device, depth, policy, delay):
    setting = Setting(policy=policy, depth=depth, **delay)
    check(serve_ranks(device, 3, 7, GROWING, setting), reference(device, 7, GROWING))


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
def test_three_layers_two_slots_back_to_back(device, delay):
    """The slot of the next forward's first layer is the one that the last layer has just read."""
    blocks = (0, 1, 2, 3, 4)
    check(serve_ranks(device, 2, 3, blocks, Setting(**delay)), reference(device, 3, blocks))


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
def test_completion_on_the_host(device, delay):
    setting = Setting(completion=Completion.HOST, **delay)
    check(serve_ranks(device, 2, 5, GROWING, setting), reference(device, 5, GROWING))


def has_history(blocks):
    return [block > 0 for block in blocks]


def wrong(served, expected):
    """By rank, which outputs differ."""
    return [[a != b for a, b in zip(r.outputs, expected.outputs, strict=True)] for r in served]


def test_control_without_broadcasts_every_output_with_history_differs(device):
    served = serve_ranks(device, 2, 5, GROWING, Setting(skip_broadcasts=True))
    assert wrong(served, reference(device, 5, GROWING)) == [has_history(GROWING)] * 2


@pytest.mark.parametrize("policy", list(Policy))
def test_control_compute_that_does_not_wait_for_completion_reads_what_was_there(device, policy):
    """The slots are poisoned before each forward, and the transfers come too late."""
    setting = Setting(policy=policy, transfer_delay=0.02, dropped=COMPUTE_STREAM)
    served = serve_ranks(device, 2, 5, GROWING, setting)
    for rank in wrong(served, reference(device, 5, GROWING)):
        assert rank[1:3] == [True, True]
        assert not rank[0]


@pytest.mark.parametrize("policy", list(Policy))
def test_control_transfers_that_do_not_wait_for_ready_are_caught(device, policy):
    """They overwrite slots that are still read, and send layers that are still written."""
    setting = Setting(policy=policy, compute_delay=0.02, dropped=TRANSFER_STREAM)
    served = serve_ranks(device, 2, 5, GROWING, setting)
    assert any(any(rank) for rank in wrong(served, reference(device, 5, GROWING)))


LAST = 4
FAILURES = {
    "one rank, first layer": {0: (3, 0)},
    "one rank, between": {1: (4, 2)},
    "one rank, last layer": {0: (2, LAST)},
    "all ranks, different layers": {0: (5, 1), 1: (5, LAST)},
}


@pytest.mark.parametrize("delay", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_after_an_aborted_forward_the_next_is_right_to_the_bit(device, fail, delay):
    setting = Setting(fail=fail, **delay)
    check(serve_ranks(device, 2, 5, GROWING, setting), reference(device, 5, GROWING))


def test_the_host_runs_two_forwards_ahead_of_a_device_that_stands_still(device):
    """Nothing in a forward blocks the host; only a third one would wait, in `begin`."""
    engine = one_rank(device)
    engine.run(0, 0)
    engine.run(1, 1)
    torch.accelerator.synchronize()
    with engine.compute_stream:
        device.stall()
        stalled = torch.Event(device.torch)
        stalled.record()
    engine.run(2, 1)
    engine.run(3, 2)
    assert not stalled.query()
    begun = threading.Event()

    def third():
        engine.run(4, 1)
        begun.set()

    thread = threading.Thread(target=third, daemon=True)
    thread.start()
    assert not begun.wait(0.2)
    device.resume()
    thread.join(30)
    assert begun.is_set()
    assert engine.forward.forwards == 5


def test_two_forwards_in_flight_share_no_event(device):
    engine = one_rank(device)
    kinds = engine.forward._programs._bound.values()
    used = [[event.native for event in bound.events] for kind in kinds for bound in kind]
    natives = [id(native) for events in used for native in events]
    assert len(natives) == len(set(natives)) > 0


def test_a_device_that_hangs_is_an_error_within_the_timeout(device):
    engine = one_rank(device, timeout=0.2)
    engine.run(0, 1)
    torch.accelerator.synchronize()
    with engine.compute_stream:
        device.stall()
    engine.run(1, 1)
    engine.run(2, 1)
    with pytest.raises(TransferError, match=r"not reached within 0\.2 s"):
        engine.run(3, 1)
    assert not engine.forward.active


def test_an_abort_of_a_forward_that_hangs_leaves_the_group_unusable(device):
    engine = one_rank(device, timeout=0.2)
    with engine.compute_stream:
        device.stall()
    with pytest.raises(ArithmeticError):
        engine.run(0, 1, fail_at=2)
    with engine.compute_stream:
        engine.forward.abort()
    with pytest.raises(TransferError, match="unusable since forward 1"):
        engine.run(1, 1)


def test_a_failure_on_the_device_surfaces_at_the_next_begin_but_one(simulated):
    engine = one_rank(simulated)
    engine.run(0, 1)
    with engine.compute_stream:
        simulated.stall()
        torch.ops.kvpp_device.fail("bus error")
    engine.run(1, 1)
    engine.run(2, 1)  # the host cannot know yet
    simulated.resume()
    with pytest.raises(TransferError, match="bus error"):
        engine.run(3, 1)


def test_a_failure_on_the_device_surfaces_at_an_abort(simulated):
    engine = one_rank(simulated)
    with engine.compute_stream:
        torch.ops.kvpp_device.fail("bus error")
    with pytest.raises(ArithmeticError):
        engine.run(0, 1, fail_at=2)
    with engine.compute_stream:
        engine.forward.abort()
    with pytest.raises(TransferError, match="unusable since forward 1 failed: The device failed"):
        engine.run(1, 1)


def test_a_thousand_forwards_make_no_event_and_allocate_nothing(device, monkeypatch):
    """Cases 7 and 9: events are pooled and transfers have no temporaries."""
    work = partial(run_many, device=device, monkeypatch=monkeypatch)
    for counts in run_threads(2, work, timeout=30.0):
        assert counts == (0, 0)


def run_many(transport, device, monkeypatch):
    engine = DeviceEngine(device, small_plan(3, 2), transport, Setting())
    for token in range(6):
        engine.run(token, token % 3)
    engine.results(1)
    transport.agree(b"warm")
    made, allocated = events_made(device), device.allocations()
    if not device.simulated:
        monkeypatch.setattr(torch, "Event", None)  # making one is an error from here on
    transport.agree(b"counted")
    for token in range(6, 1006):
        engine.run(token, token % 3)
    with engine.compute_stream:
        torch.accelerator.current_stream().synchronize()
    transport.agree(b"run")
    return events_made(device) - made, device.allocations() - allocated


def events_made(device):
    gc.collect()
    return torch.ops.kvpp_device.events() if device.simulated else 0


def test_random_answers_of_query_change_neither_order_nor_bytes(simulated):
    """Case 15: no decision depends on whether an event was reached."""
    logs = {}
    for lying in (False, True):
        torch.ops.kvpp_device.random_query(lying)
        log = {0: [], 1: []}
        setting = Setting(
            transfer_delay=0.001, log=lambda rank, op, name, log=log: log[rank].append((op, name))
        )
        served = serve_ranks(simulated, 2, 5, GROWING, setting)
        torch.ops.kvpp_device.random_query(False)
        check(served, reference(simulated, 5, GROWING))
        logs[lying] = log
    assert logs[True] == logs[False]
    assert len(logs[True][0]) > 50


def test_a_rank_that_does_not_begin_is_an_error_at_the_end_of_the_forward(device):
    """The hosts compare their forwards beside the device; the host waits for that only in `end`."""
    group = LocalGroup(2, timeout=0.3)

    class Lonely(Alone):
        def agree(self, token):
            group.transport(0).agree(token)

    engine = DeviceEngine(device, small_plan(4, 2), Lonely(), Setting(timeout=5.0))
    with pytest.raises(TransferError, match="only ranks"):
        engine.run(0, 1)
    with engine.compute_stream:
        engine.forward.abort()
    with pytest.raises(TransferError, match="unusable since forward 1"):
        engine.run(1, 0)

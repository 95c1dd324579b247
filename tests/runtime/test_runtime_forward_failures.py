"""What becomes of a forward of one rank that fails: abort, failed transfers, timeouts."""

import threading

import pytest

from kvpp_dag.errors import (
    CoverageError,
    DivergenceError,
    OrderError,
    ReentryError,
    TransferError,
)
from kvpp_dag.graph import Policy
from kvpp_dag.runtime import (
    Arena,
    CpuStream,
    ForwardPass,
    HostStream,
    ManualStream,
)
from tests.runtime.forward_support import LAYERS, PREFIXES, SOON, Alone, call, go_through
from tests.runtime_support import NUM_BLOCKS, make_engine, small_plan


@pytest.mark.parametrize("done", range(1 + 2 * LAYERS + 1))
@pytest.mark.parametrize("policy", list(Policy))
def test_abort_sends_what_is_left_and_the_next_forward_is_whole(policy, done, transport):
    """Wherever the forward stops, peers that go on get every transfer once, in order."""
    kvpp = make_engine(small_plan(LAYERS, 2), transport, policy=policy).forward
    for hook in PREFIXES["all released"].split()[:done]:
        call(kvpp, hook)
    kvpp.abort(ArithmeticError("compute fell over"))
    assert not kvpp.active
    assert transport.calls == (["agree", *range(LAYERS)] if done else [])
    transport.calls.clear()
    go_through(kvpp)
    assert transport.calls == ["agree", *range(LAYERS)]


def test_abort_waits_until_the_transfers_have_ended(kvpp, transport):
    transport.gate.clear()
    kvpp.begin(history=True)
    threading.Timer(0.2, transport.gate.set).start()
    kvpp.abort()
    assert transport.calls == ["agree", *range(LAYERS)]


def test_abort_does_nothing_between_forwards(kvpp, transport):
    kvpp.abort()
    go_through(kvpp)
    kvpp.abort()
    go_through(kvpp)
    assert transport.calls == ["agree", *range(LAYERS)] * 2


@pytest.mark.parametrize("failing", range(LAYERS))
def test_a_failed_transfer_names_the_layer_that_waited_and_closes_the_group(failing, kvpp, transport):
    transport.error_at = {failing: DivergenceError("Somebody diverged.")}
    kvpp.begin(history=True)
    for layer in range(failing):
        kvpp.acquire(layer)
        kvpp.release(layer)
    with pytest.raises(DivergenceError, match=rf"layer {failing} \(layers\.{failing}\.attn\) waited"):
        kvpp.acquire(failing)
    kvpp.abort()
    assert transport.calls == ["agree", *range(failing + 1)]  # nothing is sent after a failure
    assert not kvpp.active
    for _ in range(2):
        with pytest.raises(TransferError, match="unusable since forward 1 failed: Somebody diverged"):
            kvpp.begin(history=False)
    assert not kvpp.active
    assert kvpp.forwards == 1


def test_after_a_failed_acquire_nothing_but_abort_is_accepted(kvpp, transport):
    """Above all, a second try must not return as if the layer had arrived."""
    transport.error_at = {1: TransferError("The link broke.")}
    kvpp.begin(history=True)
    kvpp.acquire(0)
    kvpp.release(0)
    with pytest.raises(TransferError):
        kvpp.acquire(1)
    for _ in range(3):
        with pytest.raises(OrderError, match="forward 1 has failed and must be aborted"):
            kvpp.acquire(1)
    with pytest.raises(OrderError):
        kvpp.release(1)
    with pytest.raises(CoverageError):
        kvpp.end()
    with pytest.raises(ReentryError):
        kvpp.begin(history=True)
    kvpp.abort()
    assert not kvpp.active


def test_what_is_no_transfer_error_comes_through_as_it_is(kvpp, transport):
    transport.error_at = {0: ZeroDivisionError("a bug")}
    kvpp.begin(history=True)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        kvpp.acquire(0)
    kvpp.abort()
    with pytest.raises(TransferError, match="a bug"):
        kvpp.begin(history=True)


class Impatient(HostStream):
    """A compute stream whose waits time out at once, until told otherwise."""

    patience = 0.1

    def wait(self, event):
        event.synchronize(self.patience)


def impatient(transport, abort_within):
    arena = Arena(small_plan(LAYERS, 2), rank=0, num_blocks=NUM_BLOCKS)
    return ForwardPass(
        arena=arena,
        transport=transport,
        compute=Impatient("compute", timeout=SOON),
        transfer=CpuStream("transfer", timeout=SOON),
        timeout=abort_within,
    )


def test_a_transfer_that_hangs_is_an_error_within_the_timeout_and_so_is_its_abort(transport):
    kvpp = impatient(transport, 0.1)
    transport.gate.clear()
    kvpp.begin(history=True)
    with pytest.raises(TransferError, match=r"completion\[0\] was not reached within 0\.1 s"):
        kvpp.acquire(0)
    kvpp.abort()
    with pytest.raises(TransferError, match="unusable since forward 1"):
        kvpp.begin(history=True)


def test_a_transfer_that_was_only_slow_can_be_aborted_and_repeated(transport, monkeypatch):
    kvpp = impatient(transport, SOON)
    transport.gate.clear()
    kvpp.begin(history=True)
    with pytest.raises(TransferError):
        kvpp.acquire(0)
    transport.gate.set()
    kvpp.abort()
    monkeypatch.setattr(Impatient, "patience", SOON)
    go_through(kvpp)
    assert transport.calls == ["agree", *range(LAYERS)] * 2


def test_a_third_forward_waits_until_the_first_has_ended_on_an_asynchronous_compute_stream():
    arena = Arena(small_plan(LAYERS, 2), rank=0, num_blocks=NUM_BLOCKS)
    compute, transfer = ManualStream("compute"), ManualStream("transfer")
    kvpp = ForwardPass(arena=arena, transport=Alone(), compute=compute, transfer=transfer, timeout=0.05)
    go_through(kvpp)
    go_through(kvpp)
    with pytest.raises(TransferError, match="end of an earlier forward was not reached"):
        kvpp.begin(history=True)
    assert not kvpp.active
    while compute.step() or transfer.step():
        pass
    go_through(kvpp)

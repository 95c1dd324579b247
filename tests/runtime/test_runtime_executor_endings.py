"""How a run ends that does not go well: failures, cancellation, timeouts, streams that die."""

import asyncio
import threading

import pytest

from kvpp_dag.errors import NodeError, NodeTimeoutError, RunCancelledError, TransferError
from kvpp_dag.runtime import Executor, State
from tests.runtime.executor_support import (
    CANCELLED,
    DIAMOND,
    DONE,
    FAILED,
    SOON,
    Ledger,
    graph_of,
    node,
    open_streams,
)


@pytest.fixture
def streams():
    with open_streams() as streams:
        yield streams


async def test_a_failure_cancels_what_depends_on_it_and_nothing_else(streams):
    graph = graph_of(
        node("top", "a"),
        node("bad", "b", "top"),
        node("after_bad", "c", "bad"),
        node("good", "a", "top"),
        node("after_good", "d", "good"),
        node("join", "a", "after_bad", "after_good"),
    )
    ledger = Ledger(graph, failing={"bad"})
    with pytest.raises(
        NodeError, match=r"^Node bad failed: ArithmeticError: bad fell over\.$"
    ) as caught:
        await Executor(streams).run(graph, ledger.kernels)
    assert caught.value.node == "bad"
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert caught.value.states == {
        "top": DONE,
        "bad": FAILED,
        "after_bad": CANCELLED,
        "good": DONE,
        "after_good": DONE,
        "join": CANCELLED,
    }
    assert sorted(ledger.ran) == ["after_good", "bad", "good", "top"]


async def test_what_follows_a_failure_on_its_stream_is_cancelled(streams):
    graph = graph_of(node("bad", "a"), node("next", "a"), node("other", "b"))
    with pytest.raises(NodeError) as caught:
        await Executor(streams).run(graph, Ledger(graph, failing={"bad"}).kernels)
    assert caught.value.states == {"bad": FAILED, "next": CANCELLED, "other": DONE}


async def test_several_failures_surface_once_as_the_first(streams):
    graph = graph_of(node("first", "a"), node("second", "b"), node("third", "c"))
    gates = {"second": threading.Event(), "third": threading.Event()}
    ledger = Ledger(graph, failing={"first", "second", "third"}, gates=gates)

    def fail_and_open():
        try:
            ledger._run("first")
        finally:
            for gate in gates.values():
                threading.Timer(0.1, gate.set).start()

    with pytest.raises(NodeError, match=r"Node first failed.*\(2 more nodes failed\)") as caught:
        await Executor(streams).run(graph, ledger.kernels | {"first": fail_and_open})
    assert set(caught.value.states.values()) == {FAILED}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_what_is_no_exception_fails_its_node_and_not_the_stream(streams, error):
    def raising():
        raise error

    with pytest.raises(NodeError) as caught:
        await Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels | {"top": raising})
    assert caught.value.__cause__ is error
    assert await Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels)


async def test_after_a_failure_the_same_streams_run_the_next_graph(streams):
    with pytest.raises(NodeError):
        await Executor(streams).run(DIAMOND, Ledger(DIAMOND, failing={"top"}).kernels)
    ledger = Ledger(DIAMOND)
    await Executor(streams).run(DIAMOND, ledger.kernels)
    assert len(ledger.ran) == 4


async def cancelled_while_top_runs(streams, *, times=1):
    """Cancel a run of the diamond while `top` runs; what ran, and whether it waited for `top`."""
    gate, running = threading.Event(), threading.Event()
    ledger = Ledger(DIAMOND, gates={"top": gate})
    kernels = ledger.kernels | {"top": lambda: (running.set(), ledger._run("top"))}
    task = asyncio.create_task(Executor(streams).run(DIAMOND, kernels))
    while not running.is_set():
        await asyncio.sleep(0.001)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.02)
    waited = not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert caught.value.states == {"top": DONE, "l": CANCELLED, "r": CANCELLED, "end": CANCELLED}
    assert not isinstance(caught.value, Exception)
    return ledger.ran, waited


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelling_waits_for_the_running_node_and_runs_no_other(streams, times):
    ran, waited = await cancelled_while_top_runs(streams, times=times)
    assert waited
    assert ran == ["top"]
    for stream in streams.values():
        stream.synchronize(SOON)
    assert ran == ["top"]
    assert await Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels)


async def test_a_timeout_around_a_run_drains_it_too(streams):
    gate = threading.Event()
    ledger = Ledger(DIAMOND, gates={"top": gate})
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(TimeoutError) as caught:
        await asyncio.wait_for(Executor(streams).run(DIAMOND, ledger.kernels), 0.05)
    assert ledger.ran == ["top"]
    assert caught.value.__cause__.states["end"] == CANCELLED


async def test_a_failure_before_a_cancellation_is_its_cause(streams):
    graph = graph_of(node("bad", "a"), node("slow", "b"), node("after_bad", "c", "bad"))
    gate = threading.Event()
    ledger = Ledger(graph, failing={"bad"}, gates={"slow": gate})
    task = asyncio.create_task(Executor(streams).run(graph, ledger.kernels))
    while ledger.ran != ["bad"] or "slow" not in ledger.started:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.sleep(0.02)
    gate.set()
    with pytest.raises(RunCancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert caught.value.states == {"bad": FAILED, "slow": DONE, "after_bad": CANCELLED}


@pytest.fixture
def gate():
    """Holds up a kernel that must not return, until the test has ended."""
    gate = threading.Event()
    yield gate
    gate.set()


async def test_a_kernel_that_never_returns_is_an_error_that_names_it(streams, gate):
    """Without a timeout the run would never end."""
    graph = graph_of(node("fine", "b"), node("stuck", "a", "fine"), node("after", "a"), node("c", "b"))
    ledger = Ledger(graph, gates={"stuck": gate})
    with pytest.raises(
        NodeTimeoutError, match=r"^Node stuck did not return within the 0\.2 s"
    ) as caught:
        await Executor(streams).run(graph, ledger.kernels, timeout=0.2)
    assert caught.value.node == "stuck"
    assert caught.value.states == {
        "fine": DONE,
        "stuck": State.RUNNING,
        "after": CANCELLED,
        "c": DONE,
    }
    gate.set()
    streams["a"].synchronize(SOON)
    assert "after" not in ledger.ran
    assert caught.value.states["stuck"] == State.RUNNING  # what was reported stays as it was
    assert await Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels, timeout=SOON)


async def test_a_timeout_that_is_not_reached_changes_nothing(streams):
    states = await Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels, timeout=SOON)
    assert set(states.values()) == {DONE}


async def test_a_stream_that_is_busy_with_something_else_is_not_blamed_on_a_kernel(streams, gate):
    streams["a"].launch(lambda: gate.wait(SOON))
    ledger = Ledger(DIAMOND)
    with pytest.raises(NodeTimeoutError, match=r"top was not reached within the 0\.1 s") as caught:
        await Executor(streams).run(DIAMOND, ledger.kernels, timeout=0.1)
    assert set(caught.value.states.values()) == {CANCELLED}
    gate.set()
    streams["a"].synchronize(SOON)
    assert ledger.ran == []


async def test_the_first_failure_is_the_cause_of_a_later_timeout(streams, gate):
    graph = graph_of(node("bad", "a"), node("stuck", "b"))
    ledger = Ledger(graph, failing={"bad"}, gates={"stuck": gate})
    with pytest.raises(NodeTimeoutError) as caught:
        await Executor(streams).run(graph, ledger.kernels, timeout=0.2)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert caught.value.states == {"bad": FAILED, "stuck": State.RUNNING}


async def test_cancelling_a_run_that_is_stuck_ends_at_its_timeout(streams, gate):
    ledger = Ledger(DIAMOND, gates={"top": gate})
    task = asyncio.create_task(Executor(streams).run(DIAMOND, ledger.kernels, timeout=0.3))
    while "top" not in ledger.started:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(RunCancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, NodeTimeoutError)
    assert caught.value.states["top"] == State.RUNNING


def test_a_kernel_that_returns_after_its_event_loop_was_closed_harms_no_stream(streams, gate):
    with pytest.raises(NodeTimeoutError):
        asyncio.run(
            Executor(streams).run(DIAMOND, Ledger(DIAMOND, gates={"top": gate}).kernels, timeout=0.1)
        )
    gate.set()
    streams["a"].synchronize(SOON)  # raises what the stream failed with
    assert asyncio.run(Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels))


def closed(stream):
    stream.close()


def failed(stream):
    stream.launch(lambda: 1 / 0)


@pytest.mark.parametrize("death", [closed, failed])
async def test_a_stream_that_dies_during_a_run_fails_the_node_it_would_have_run_next(streams, death):
    """Nothing else of the run may be lost, and it must end by itself."""
    graph = graph_of(
        node("first", "a"),
        node("lost", "b", "first"),
        node("next", "b"),
        node("after_lost", "c", "lost"),
        node("other", "d", "first"),
    )
    ledger = Ledger(graph)
    kernels = ledger.kernels | {"first": lambda: (death(streams["b"]), ledger._run("first"))}
    with pytest.raises(NodeError, match=r"Node lost failed.*stream 'b' runs nothing any more") as caught:
        await asyncio.wait_for(Executor(streams).run(graph, kernels), SOON)
    assert isinstance(caught.value.__cause__, TransferError)
    assert caught.value.states == {
        "first": DONE,
        "lost": FAILED,
        "next": CANCELLED,
        "after_lost": CANCELLED,
        "other": DONE,
    }
    with pytest.raises(TransferError, match="stream 'b' has failed before"):
        await Executor(streams).run(graph, ledger.kernels)


async def test_a_stream_that_has_failed_is_an_error_and_not_a_hang(streams):
    def raising():
        raise ZeroDivisionError("long ago")

    streams["b"].launch(raising)
    with pytest.raises(ZeroDivisionError):
        streams["b"].synchronize(SOON)
    ledger = Ledger(DIAMOND)
    with pytest.raises(TransferError, match=r"stream 'b' has failed.*long ago"):
        await Executor(streams).run(DIAMOND, ledger.kernels)
    assert ledger.ran == []

"""Streams and events: order, waiting, errors, timeouts, and stepping by hand."""

import threading
from itertools import count

import pytest

from kvpp_dag.errors import TransferError
from kvpp_dag.runtime import CpuStream, HostEvent, HostStream, ManualStream
from kvpp_dag.runtime.tape import Line

SOON = 20.0
"""Seconds that a test waits for what must happen."""


@pytest.fixture
def cpu():
    """Makes CPU streams and ends their workers afterwards."""
    streams = []

    def make(name="s", timeout=SOON):
        streams.append(CpuStream(name, timeout=timeout))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


def fail():
    raise ArithmeticError("no luck")


def test_cpu_stream_runs_in_order_on_a_thread_of_its_own(cpu):
    stream, ran, threads = cpu(), [], set()
    for i in range(200):
        stream.launch(lambda i=i: (ran.append(i), threads.add(threading.get_ident())))
    stream.synchronize(SOON)
    assert ran == list(range(200))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_an_event_is_reached_after_what_was_submitted_before_it(cpu):
    stream, gate, event = cpu(), threading.Event(), HostEvent("e")
    stream.launch(lambda: gate.wait(SOON))
    stream.record(event)
    assert not event.query()
    gate.set()
    event.synchronize(SOON)
    assert event.query()


def test_a_wait_holds_back_only_what_comes_after_it(cpu):
    first, second, gate, event, ran = cpu(), cpu(), threading.Event(), HostEvent("e"), []
    first.launch(lambda: gate.wait(SOON))
    first.launch(lambda: ran.append("first"))
    first.record(event)
    before = HostEvent("before the wait")
    second.record(before)
    second.wait(event)
    second.launch(lambda: ran.append("second"))
    before.synchronize(SOON)
    assert ran == []
    gate.set()
    second.synchronize(SOON)
    assert ran == ["first", "second"]


def test_an_event_never_recorded_holds_nobody_back(cpu):
    stream = cpu()
    stream.wait(HostEvent("e"))
    stream.synchronize(SOON)


def test_an_event_can_be_recorded_again(cpu):
    stream, event = cpu(), HostEvent("e")
    for _ in range(3):
        gate = threading.Event()
        stream.launch(lambda gate=gate: gate.wait(SOON))
        stream.record(event)
        assert not event.query()
        gate.set()
        event.synchronize(SOON)


def test_after_an_error_a_stream_skips_work_and_every_later_event_carries_the_error(cpu):
    stream, ran, before, after = cpu(), [], HostEvent("before"), HostEvent("after")
    stream.record(before)
    stream.launch(fail)
    stream.launch(lambda: ran.append("later"))
    stream.record(after)
    before.synchronize(SOON)
    for wait in (after.synchronize, after.synchronize, stream.synchronize):
        with pytest.raises(ArithmeticError, match="no luck"):
            wait(SOON)
    assert isinstance(stream.error, ArithmeticError)
    assert ran == []


def test_an_error_travels_over_a_wait_to_another_stream(cpu):
    first, second, event, ran = cpu(), cpu(), HostEvent("e"), []
    first.launch(fail)
    first.record(event)
    second.launch(lambda: ran.append("before"))
    second.wait(event)
    second.launch(lambda: ran.append("after"))
    with pytest.raises(ArithmeticError, match="no luck"):
        second.synchronize(SOON)
    assert ran == ["before"]


def test_a_recorded_again_event_forgets_an_error():
    event, stream = HostEvent("e"), HostStream("h", timeout=SOON)
    event.settle(ArithmeticError("old"))
    with pytest.raises(ArithmeticError):
        event.synchronize(SOON)
    stream.record(event)
    event.synchronize(SOON)


def test_a_stream_that_raises_what_is_no_exception_still_reports_it(cpu):
    stream = cpu()

    def leave():
        raise SystemExit(3)

    stream.launch(leave)
    with pytest.raises(SystemExit):
        stream.synchronize(SOON)


def test_waiting_too_long_is_a_transfer_error_and_not_a_hang(cpu):
    stream, gate, late = cpu(), threading.Event(), HostEvent("completion[3]")
    stream.launch(lambda: gate.wait(SOON))
    stream.record(late)
    impatient, host, ran = cpu("impatient", 0.05), HostStream("host", timeout=0.05), []
    impatient.wait(late)
    impatient.launch(lambda: ran.append("after"))
    waits = (
        lambda: late.synchronize(0.05),
        lambda: stream.synchronize(0.05),
        lambda: host.wait(late),
        lambda: impatient.synchronize(SOON),
    )
    for wait in waits:
        with pytest.raises(TransferError, match=r"not reached within 0\.05 s"):
            wait()
    with pytest.raises(TransferError, match=r"^completion\[3\] was not reached"):
        host.wait(late)
    assert ran == []
    gate.set()
    late.synchronize(SOON)


def test_close_runs_what_was_submitted_and_ends_the_worker():
    stream, ran = CpuStream("closing", timeout=SOON), []
    stream.launch(lambda: ran.append(1))
    stream.close()
    assert ran == [1]
    assert "kvpp-closing" not in {thread.name for thread in threading.enumerate()}


def test_host_stream_is_the_calling_thread():
    host, event, threads = HostStream("host", timeout=SOON), HostEvent("e"), []
    host.launch(lambda: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()]
    host.record(event)
    assert event.query()
    host.wait(event)
    host.synchronize(SOON)
    with pytest.raises(ArithmeticError):
        host.launch(fail)


def test_manual_stream_moves_only_when_stepped():
    stream, ran, event = ManualStream("m"), [], HostEvent("e")
    stream.launch(lambda: ran.append(1))
    stream.record(event)
    stream.launch(lambda: ran.append(2))
    assert (len(stream), ran, event.query()) == (3, [], False)
    assert stream.step()
    assert (ran, event.query()) == ([1], False)
    assert stream.step()
    assert (ran, event.query()) == ([1], True)
    assert stream.step()
    assert ran == [1, 2]
    assert not stream.step()


def test_manual_stream_does_not_step_over_a_wait():
    first, second, event, ran = ManualStream("a"), ManualStream("b"), HostEvent("e"), []
    first.record(event)
    second.wait(event)
    second.launch(lambda: ran.append("after"))
    assert not second.step()
    with pytest.raises(TransferError, match="2 items that wait for an event"):
        second.synchronize(SOON)
    assert first.step()
    second.synchronize(SOON)
    assert ran == ["after"]


def test_manual_stream_skips_after_an_error_and_passes_it_on():
    first, second, event, ran = ManualStream("a"), ManualStream("b"), HostEvent("e"), []
    first.launch(fail)
    first.launch(lambda: ran.append("first"))
    first.record(event)
    second.wait(event)
    second.launch(lambda: ran.append("second"))
    for stream in (first, second):
        with pytest.raises(ArithmeticError, match="no luck"):
            stream.synchronize(SOON)
    assert ran == []


def test_a_wait_that_finds_its_event_reached_takes_no_time_and_others_do():
    line, event = Line(count(1).__next__), HostEvent()
    event.settle()
    event.take_noted(SOON, line)
    assert line.times == [1]
    timer = threading.Timer(0.05, event.settle)
    timer.start()
    event.take_noted(SOON, line)
    assert line.times == [1, -2, 3]
    event.settle(ValueError("the transfer failed"))
    with pytest.raises(ValueError, match="the transfer failed"):
        event.take_noted(SOON, line)
    assert line.times == [1, -2, 3, -4]  # the wait began, and never ended


def test_a_noted_settle_is_noted_before_anybody_can_see_it():
    seen = []
    event = HostEvent()
    event.reset()
    line = Line(lambda: seen.append(event.query()) or 7)
    event.settle_noted(line)
    assert (line.times, seen, event.query()) == ([7], [False], True)

"""Streams and events of an accelerator: order, waiting, errors, timeouts."""

import threading

import pytest
import torch

from kvpp_dag.errors import ConfigError, TransferError
from kvpp_dag.graph import Policy, build_forward
from kvpp_dag.runtime import (
    AcceleratorStream,
    Completion,
    CpuStream,
    CurrentStream,
    Executor,
    HostStream,
    find_accelerator,
    group_backend,
    make_streams,
)
from kvpp_dag.runtime.accelerator import AcceleratorEvent
from tests.runtime_support import small_plan

SOON = 30.0


@pytest.fixture
def transfer(device):
    return AcceleratorStream("transfer", device.torch)


@pytest.fixture
def compute(device):
    return CurrentStream("compute", device.torch, timeout=SOON)


@pytest.fixture
def cell(device):
    """One number in device memory."""
    value = torch.zeros(1, dtype=torch.int64, device=device.torch)
    torch.accelerator.synchronize()
    return value


def fail():
    raise ArithmeticError("no luck")


def test_launch_submits_to_the_stream_and_returns_before_the_device_has_run_it(device, transfer, cell):
    before = torch.accelerator.current_stream()
    event = transfer.event("e")
    transfer.launch(device.stall)
    transfer.launch(lambda: cell.fill_(1))
    transfer.record(event)
    assert not event.query()
    assert torch.accelerator.current_stream() == before
    device.resume()
    event.synchronize(SOON)
    assert cell.cpu().item() == 1


def test_a_wait_holds_back_the_stream_and_not_the_host(device, transfer, compute, cell):
    event = transfer.event("e")
    transfer.launch(device.stall)
    transfer.launch(lambda: cell.fill_(5))
    transfer.record(event)
    with device.stream():
        compute.wait(event)
        cell.mul_(3)
        done = compute.event("done")
        compute.record(done)
        assert not event.query()
        assert not done.query()
        device.resume()
        compute.synchronize(SOON)
        assert cell.cpu().item() == 15


def test_the_compute_stream_is_the_one_that_is_current_at_each_call(device, compute, transfer):
    slow, fast = device.stream(), device.stream()
    behind_slow, behind_fast = compute.event("behind slow"), compute.event("behind fast")
    with slow:
        device.stall()
        compute.record(behind_slow)
    with fast:
        compute.record(behind_fast)
    behind_fast.synchronize(SOON)
    assert not behind_slow.query()
    device.resume()
    behind_slow.synchronize(SOON)


def test_with_completion_on_the_host_a_wait_blocks_the_host(device, transfer):
    compute = CurrentStream("compute", device.torch, timeout=SOON, completion=Completion.HOST)
    event = transfer.event("e")
    transfer.launch(device.stall)
    transfer.record(event)
    returned = threading.Event()

    def engine():
        compute.wait(event)
        returned.set()

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    assert not returned.wait(0.2)
    device.resume()
    assert returned.wait(SOON)
    assert event.query()


def test_an_event_never_recorded_holds_nobody_back(transfer, compute):
    event = transfer.event("e")
    assert event.query()
    transfer.wait(event)
    transfer.synchronize(SOON)
    compute.wait(event)
    compute.synchronize(SOON)


def test_a_wait_is_for_the_record_before_it_and_not_for_a_later_one(device, transfer):
    other = AcceleratorStream("other", device.torch)
    event = transfer.event("e")
    transfer.record(event)
    other.wait(event)
    transfer.launch(device.stall)
    transfer.record(event)
    other.synchronize(SOON)
    assert not event.query()


def test_after_an_error_nothing_is_submitted_and_every_later_event_carries_it(transfer, compute):
    ran, before, after = [], transfer.event("before"), transfer.event("after")
    transfer.record(before)
    transfer.launch(fail)
    transfer.launch(lambda: ran.append("later"))
    transfer.record(after)
    before.synchronize(SOON)
    compute.wait(before)
    for wait in (lambda: after.synchronize(SOON), lambda: compute.wait(after)):
        with pytest.raises(ArithmeticError, match="no luck"):
            wait()
    with pytest.raises(ArithmeticError, match="no luck"):
        transfer.synchronize(SOON)
    assert ran == []


def test_an_error_travels_over_a_wait_to_another_stream(device, transfer):
    other, event = AcceleratorStream("other", device.torch), transfer.event("e")
    transfer.launch(fail)
    transfer.record(event)
    other.wait(event)
    assert isinstance(other.error, ArithmeticError)


def test_waiting_too_long_is_a_transfer_error_and_not_a_hang(device, transfer):
    event = transfer.event("completion[3]")
    transfer.launch(device.stall)
    transfer.record(event)
    for wait in (event.synchronize, transfer.synchronize):
        with pytest.raises(TransferError, match=r"was not reached within 0\.05 s"):
            wait(0.05)
    device.resume()
    event.synchronize(SOON)


def test_what_fails_on_the_device_is_a_transfer_error_where_the_host_looks(simulated, transfer):
    event = transfer.event("completion[1]")
    transfer.launch(lambda: torch.ops.kvpp_device.fail("link down"))
    transfer.record(event)
    with pytest.raises(TransferError, match=r"before completion\[1\] was reached.*link down"):
        event.synchronize(SOON)


def test_a_lie_of_query_does_not_let_the_host_go_on(simulated, transfer, cell):
    torch.ops.kvpp_device.random_query(True)
    for value in range(1, 30):
        event = transfer.event("e")
        transfer.launch(lambda: simulated.delay(0.002))
        transfer.launch(lambda value=value: cell.fill_(value))
        transfer.record(event)
        event.synchronize(SOON)
        assert cell.cpu().item() == value


def test_streams_by_device(device):
    host = make_streams(torch.device("cpu"), timeout=1.0)
    assert (type(host.compute), type(host.transfer), host.control) == (HostStream, CpuStream, None)
    streams = make_streams(device.torch, timeout=1.0)
    kinds = [type(stream) for stream in (streams.compute, streams.transfer, streams.control)]
    assert kinds == [CurrentStream, AcceleratorStream, CpuStream]
    assert isinstance(streams.transfer.event("e"), AcceleratorEvent)


def test_backends_by_device():
    assert group_backend("cpu") == "gloo"
    assert group_backend("cuda") == "cpu:gloo,cuda:nccl"
    assert group_backend("npu") == "cpu:gloo,npu:hccl"
    assert group_backend("xpu") == "cpu:gloo,xpu:xccl"
    with pytest.raises(ConfigError, match="'tpu'"):
        group_backend("tpu")


def test_the_accelerator_is_found(device):
    assert find_accelerator().type == device.torch.type


async def test_the_executor_refuses_streams_where_returning_is_not_running(device, transfer, compute):
    graph = build_forward(
        small_plan(1, 1), rank=0, num_blocks=1, history=False, policy=Policy.ON_ACQUIRE
    )
    kernels = {node.id: (lambda: None) for node in graph.nodes}
    with pytest.raises(ConfigError, match="accelerator"):
        await Executor({"compute": compute, "transfer": transfer}).run(graph, kernels)

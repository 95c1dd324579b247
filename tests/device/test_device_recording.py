"""What a recorder keeps of forwards on a device: the device's own times, on the host's clock."""

import time
from itertools import pairwise

import pytest
import torch

from kvpp_dag.graph import Kind, Policy
from kvpp_dag.trace import Recorder, summarize
from tests.device.ranks import Setting, one_rank, serve_ranks

BLOCKS = (0, 1, 2, 3, 0, 1, 2, 4)
DELAY = 0.004
LAYERS = 5
SLACK = 10_000_000
"""Nanoseconds by which the device's clock may be tied wrongly to that of a host that is busy."""


def record(device, ranks=2, **setting):
    recorders = [Recorder() for _ in range(ranks)]
    before = time.perf_counter_ns()
    serve_ranks(device, ranks, LAYERS, BLOCKS, Setting(observer=recorders.__getitem__, **setting))
    after = time.perf_counter_ns()
    records = [recorder.forwards for recorder in recorders]
    for rank in records:
        assert [forward.number for forward in rank] == list(range(1, len(BLOCKS) + 1))
        for forward in rank:
            check(forward, before, after)
        for earlier, later in pairwise(rank):
            assert earlier.spans[f"compute[{LAYERS - 1}]"].end <= later.spans["prologue"].start
    return records


def check(forward, before, after):
    assert sorted(forward.spans) == sorted(node.id for node in forward.graph.nodes)
    assert list(forward.waits) == [n.id for n in forward.graph.nodes if n.kind is Kind.COMPLETION]
    for span in (*forward.spans.values(), *forward.waits.values()):
        assert before - SLACK < forward.began <= span.start
        assert span.start <= span.end <= forward.ended < after + SLACK
    for event, wait in forward.waits.items():
        assert forward.spans[event].start <= wait.end
    for node in forward.graph.nodes:
        for name in node.after:
            if (
                forward.graph[name].kind is not Kind.READY
            ):  # noted before the stream may record the event
                assert forward.spans[name].start <= forward.spans[node.id].start, (name, node.id)


def durations(records, kind):
    return [
        forward.spans[node.id].duration
        for rank in records
        for forward in rank
        for node in forward.graph.nodes
        if node.kind is kind
    ]


@pytest.mark.parametrize("policy", list(Policy))
def test_slow_transfers_take_their_time_on_the_device_and_are_waited_for(device, policy):
    records = record(device, policy=policy, transfer_delay=DELAY)
    assert min(durations(records, Kind.BROADCAST)) > 0.9e9 * DELAY
    first = "completion[0]"
    for rank in records:
        assert summarize(rank).exposed_ns > 0
        # The first layer has only the prologue to hide behind; on a busy machine others may hide wholly.
        assert (
            max(forward.waits[first].duration for forward in rank if first in forward.waits)
            > 0.3e9 * DELAY
        )
        for forward in rank:
            for name, submitted in forward.submitted.items():
                assert submitted < forward.spans[name].end - 0.9e9 * DELAY


def test_slow_compute_takes_its_time_on_the_device(device):
    for rank in record(device, compute_delay=DELAY):
        for forward in rank:
            for layer in range(LAYERS):
                assert forward.spans[f"attend[{layer}]"].duration > 0.9e9 * DELAY


def test_the_times_are_the_device_s_and_not_those_of_the_submission(simulated):
    recorder = Recorder()
    engine = one_rank(simulated, observer=lambda rank: recorder)
    for token, block in enumerate((0, 1, 2)):
        engine.run(token, block)
    torch.accelerator.synchronize()
    with engine.compute_stream:
        simulated.stall()
    engine.run(3, 1)
    submitted = time.perf_counter_ns()
    time.sleep(10 * SLACK / 1e9)
    simulated.resume()
    engine.results(4)
    last = recorder.forwards[-1]
    assert max(last.submitted.values()) < submitted < last.began

"""Ranges in a profile of torch: the names of our traces, on every thread, and none unless asked for."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvpp_dag.graph import Policy
from kvpp_dag.plan import plan_stage
from kvpp_dag.runtime import Arena, Costs, CpuStream, ForwardPass, HostStream, Payload
from kvpp_dag.runtime.ranges import Range
from tests.runtime_support import NUM_BLOCKS, small_specs

LAYERS = 3
ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


class Alone:
    rank, size = 0, 2

    def prepare(self, view, owner):
        return lambda: None

    def agree(self, token):
        pass


def make(profiled, payload=Payload.FULL):
    plan = plan_stage(small_specs(LAYERS), ranks=2, staging=True)
    return ForwardPass(
        arena=Arena(plan, rank=0, num_blocks=NUM_BLOCKS),
        transport=Alone(),
        compute=HostStream("compute", timeout=9.0),
        transfer=CpuStream("transfer", timeout=9.0),
        copy=CpuStream("copy", timeout=9.0),
        policy=Policy.ON_RELEASE,
        payload=payload,
        costs=Costs(start=1.0, run=1.0, send=0.0, copy_start=0.0, copy=0.0),
        profiled=profiled,
    )


def run(forward, stop_at=None):
    forward.begin(history=True, used=[0, 2])
    for layer in range(LAYERS):
        forward.acquire(layer)
        if layer == stop_at:
            forward.abort()
            return
        forward.release(layer)
    forward.end()


def names(forward, **settings):
    with profile(activities=[ProfilerActivity.CPU], experimental_config=ALL_THREADS) as seen:
        run(forward, **settings)
    return Counter(event.name for event in seen.events() if event.name.startswith("kvpp."))


def expected(*labels):
    layers = [f"kvpp.{label}.layer_{i}" for label in labels for i in range(LAYERS)]
    return Counter(["kvpp.prepare", "kvpp.prologue", *layers])


WHOLE = ("ready", "broadcast", "wait", "attend", "compute")
PACKED = ("ready", "pack.0", "broadcast.0", "unpack.0", "wait", "attend", "compute")


def test_every_hook_transfer_and_layer_is_a_range():
    assert names(make(True)) == expected(*WHOLE)


def test_packing_is_seen_as_well():
    assert names(make(True, Payload.ACTIVE)) >= expected(*PACKED)


def test_there_are_none_unless_asked_for():
    assert not names(make(False))


def test_a_range_that_an_abort_left_open_is_closed_by_the_next_forward():
    forward = make(True)
    assert names(forward, stop_at=1) < expected(*WHOLE)
    assert names(forward) == expected(*WHOLE)


@pytest.mark.parametrize("calls", [["stop"], ["start", "stop", "stop"], ["start", "start", "stop"]])
def test_a_range_can_be_closed_at_any_time(calls):
    mark = Range("kvpp.x")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for call in calls:
            getattr(mark, call)()
    assert sum(event.name == "kvpp.x" for event in seen.events()) == calls.count("start")

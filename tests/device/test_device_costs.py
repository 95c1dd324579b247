"""Costs measured on a device: nothing is measured in memory that the device is still making."""

from dataclasses import astuple
from functools import partial

import torch

from kvpp_dag.plan import plan_stage
from kvpp_dag.runtime import Arena, Costs, calibrate, make_streams, measure_costs
from tests.device.ranks import PATIENCE
from tests.runtime_support import run_threads, small_specs

ZEROING = 0.3
"""Seconds by which the zeroing of the arena is late; the measurement takes less."""


def measure(transport, device):
    """The costs that a rank is left with where the last thing to be zeroed is so late."""
    plan = plan_stage(small_specs(5), ranks=transport.size, staging=True)

    def allocate(nbytes):
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device.torch)
        device.delay(ZEROING / 5)
        return memory.zero_()

    streams = make_streams(device.torch, timeout=PATIENCE)
    with device.stream():
        return measure_costs(
            arena=Arena(plan, rank=transport.rank, num_blocks=33, allocate=allocate),
            transport=transport,
            compute=streams.compute,
            transfer=streams.transfer,
            copy=streams.copy,
            timeout=PATIENCE,
        )


def measure_on_two_ranks(device):
    results = run_threads(2, partial(measure, device=device), timeout=PATIENCE)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_late_zeroing_does_not_wipe_out_what_was_measured(device):
    costs, others = measure_on_two_ranks(device)
    assert costs == others != Costs()
    assert all(cost > 0 for cost in astuple(costs))


def test_control_without_that_order_the_costs_are_gone(device, monkeypatch):
    monkeypatch.setattr(calibrate, "_order_behind", lambda *streams: None)
    assert measure_on_two_ranks(device)[1] == Costs(
        start=0.0, run=0.0, copy_start=0.0, send=0.0, copy=0.0
    )

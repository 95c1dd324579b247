"""What a test changes about the payload of a running worker: functions for `Workload.before`."""

from dataclasses import replace
from typing import Any

from kvpp_dag.runtime import Costs


def pack(worker: Any) -> None:
    """Make packed chunks the cheapest way to send."""
    _set_costs(worker, Costs(start=1.0, copy_start=0.0, send=1.0, copy=0.0))


def send_runs(worker: Any) -> None:
    """Make runs in place the cheapest way to send."""
    _set_costs(worker, Costs(start=0.0, copy_start=1.0, send=1.0, copy=1.0))


def forget_a_block(worker: Any) -> None:
    """A control: leave the first block that holds history out of every step's list."""
    step = worker.kvpp._book.step

    def step_without_one(scheduler_output: Any) -> Any:
        used, fresh = step(scheduler_output)
        return used[1:], fresh

    worker.kvpp._book.step = step_without_one


def _set_costs(worker: Any, costs: Costs) -> None:
    forward = worker.kvpp._forward
    forward._chooser = replace(forward._chooser, costs=costs)

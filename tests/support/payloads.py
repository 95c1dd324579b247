"""What a test changes about the payload of a running worker: functions for `Workload.before`."""

from itertools import count
from typing import Any

from kvpp_dag.runtime.payload import FULL, RUNS, Kind, Way, WayChooser


def pack(worker: Any) -> None:
    """Always send packed chunks."""
    WayChooser.choose = lambda self, used, runs: (Way.PACKED, self.chunks(used))


def send_runs(worker: Any) -> None:
    """Always send runs in place."""
    WayChooser.choose = lambda self, used, runs: RUNS


def poison_and_pack(worker: Any) -> None:
    """Begin with NaN everywhere: a block is of use only where it was zeroed, written or received since."""
    poison(worker)
    pack(worker)


def poison_and_take_turns(worker: Any) -> None:
    """The same, with every way to send."""
    poison(worker)
    take_turns(worker)


def poison(worker: Any) -> None:
    """Fill all storage of a rank with NaN, in fp32, bf16 and fp8 alike."""
    for tensor in worker.kvpp._arena._tensors():
        tensor.fill_(0xFF)


def take_turns(worker: Any) -> None:
    """Send in another way at every step, whatever it costs: whole, as runs, packed; the same way on all ranks."""
    asked = count()

    def choose(self: WayChooser, used: int, runs: int) -> Kind:
        return (FULL, RUNS, (Way.PACKED, self.chunks(used)))[next(asked) % 3]

    WayChooser.choose = choose


def forget_a_block(worker: Any) -> None:
    """A control: leave the first block that holds history out of every step's list."""
    step = worker.kvpp._book.step

    def step_without_one(scheduler_output: Any) -> Any:
        used, fresh = step(scheduler_output)
        return used[1:], fresh

    worker.kvpp._book.step = step_without_one

"""What is run, and when the result is right: equal to one rank alone, and different where a control broke it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kvpp_dag.check_device.device import Device
from kvpp_dag.check_device.model import Served, Setting
from kvpp_dag.check_device.processes import serve_devices
from kvpp_dag.check_device.ranks import reference, serve_ranks
from kvpp_dag.errors import KvppError
from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM, Policy
from kvpp_dag.runtime import Completion
from kvpp_dag.runtime.payload import Way

RANKS, LAYERS = 2, 6
BLOCKS = (0, 1, 2, 6, 0, 1, 2, 9)
"""Of each forward, the block that it caches: histories of up to nine blocks, which travel in up to eight chunks."""

DELAYS = {
    "no delay": (0.0, 0.0),
    "slow compute": (0.005, 0.0),
    "slow transfers": (0.0, 0.005),
}
WAYS = {Way.FULL: "whole bundles", Way.RUNS: "runs of blocks", Way.PACKED: "packed chunks"}

RIGHT = {
    f"{WAYS[way]}, {policy}, {name}": Setting(
        way=way, policy=policy, compute_delay=compute, transfer_delay=transfer
    )
    for way, policy, (name, (compute, transfer)) in product(WAYS, Policy, DELAYS.items())
} | {
    f"whole bundles, {policy}, slow transfers, the host waits": Setting(
        policy=policy, completion=Completion.HOST, transfer_delay=0.005
    )
    for policy in Policy
}

WRONG = {
    f"control, {WAYS[way]}, {name}": setting
    for way in WAYS
    for name, setting in {
        "no broadcasts": Setting(way=way, skip_broadcasts=True),
        "compute does not wait": Setting(way=way, transfer_delay=0.02, dropped=COMPUTE_STREAM),
    }.items()
} | {
    "control, whole bundles, transfers do not wait": Setting(
        compute_delay=0.02, dropped=TRANSFER_STREAM
    ),
    "control, packed chunks, copies do not wait": Setting(
        way=Way.PACKED, transfer_delay=0.02, dropped=COPY_STREAM
    ),
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the verdict; `detail` is what went wrong, where more is known than a difference."""

    name: str
    passed: bool
    detail: str = ""


def check_one_device(device: Device) -> Iterator[Check]:
    """Every setting on ranks that are threads."""
    expected = reference(device, LAYERS, BLOCKS)
    for name, setting in (RIGHT | WRONG).items():
        try:
            served = serve_ranks(device, RANKS, LAYERS, BLOCKS, setting)
        except (KvppError, RuntimeError) as error:
            yield Check(name=name, passed=False, detail=first_line(error))
        else:
            yield Check(name=name, passed=equal(served, expected) == (name in RIGHT))


def check_devices(device: Device, count: int) -> Iterator[Check]:
    """Every setting on ranks that are processes with a device each, beside collectives of a second group."""
    expected = reference(device, LAYERS, BLOCKS)
    names = {f"{count} devices, {name}": name in RIGHT for name in RIGHT | WRONG}
    try:
        ranks = serve_devices(device.torch.type, count, LAYERS, BLOCKS, tuple((RIGHT | WRONG).values()))
    except (KvppError, RuntimeError) as error:
        yield Check(name=f"{count} devices", passed=False, detail=first_line(error))
        return
    for (name, right), served in zip(names.items(), zip(*ranks, strict=True), strict=True):
        yield Check(name=name, passed=equal(served, expected) == right)


def first_line(error: Exception) -> str:
    """What an error says, without the traces that torch adds."""
    return str(error).partition("\n")[0]


def equal(served: Sequence[Served], expected: Served) -> bool:
    """Whether every rank has the outputs and caches that one rank alone has."""
    return all(
        rank.outputs == expected.outputs
        and all(rank.owned[ordinal] == expected.owned[ordinal] for ordinal in rank.owned)
        for rank in served
    )

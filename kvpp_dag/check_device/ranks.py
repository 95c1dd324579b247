"""Ranks that are threads of this process, all on one device."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from kvpp_dag.check_device.device import PATIENCE, Device
from kvpp_dag.check_device.model import DeviceEngine, Served, Setting, check_plan
from kvpp_dag.errors import TransferError
from kvpp_dag.runtime import LocalGroup, Transport

POISON = 0xEE
Result = TypeVar("Result")


def serve(
    transport: Transport,
    device: Device,
    layers: int,
    blocks: Sequence[int],
    setting: Setting,
    *,
    group: dist.ProcessGroup | None = None,
) -> Served:
    """Submit one forward per item of `blocks`, and look only when all are submitted.

    Before each, whatever a rank receives into is filled with something else, so that nothing survives there.
    """
    plan = check_plan(layers, transport.size, setting)
    engine = DeviceEngine(device, plan, transport, setting, group=group)
    for token, block in enumerate(blocks):
        engine.poison(POISON)
        engine.run(token, block)
    return engine.served(len(blocks))


def serve_ranks(
    device: Device, ranks: int, layers: int, blocks: Sequence[int], setting: Setting
) -> list[Served]:
    """`serve` on every rank of a local group. Raises what a rank raised."""
    return run_ranks(ranks, lambda transport: serve(transport, device, layers, blocks, setting))


def reference(device: Device, layers: int, blocks: Sequence[int]) -> Served:
    """One rank that holds every layer and transfers nothing."""
    return serve(LocalGroup(1).transport(0), device, layers, blocks, Setting())


def run_ranks(ranks: int, work: Callable[[Transport], Result]) -> list[Result]:
    """`work` on every rank of a local group, each on a thread. Raises what a rank raised."""
    group = LocalGroup(ranks, timeout=PATIENCE)
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(group.transport(rank))
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        raise next(iter(errors.values()))
    if len(results) < ranks:
        raise TransferError(f"A rank did not return within {2 * PATIENCE:g} s; its device may hang.")
    return [results[rank] for rank in range(ranks)]

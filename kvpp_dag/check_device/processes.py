"""Ranks that are processes, one a device, over the collectives of the vendor's library.

The engine's place is taken by a second process group, whose collectives run on the compute stream beside KVPP's.
Not yet run on real devices.
"""

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from kvpp_dag.check_device.device import PATIENCE, Device
from kvpp_dag.check_device.model import Served, Setting
from kvpp_dag.check_device.ranks import serve
from kvpp_dag.runtime import (
    ProcessGroupTransport,
    find_accelerator,
    group_backend,
    new_group,
    prepare_nccl,
    uses_nccl,
    warm_up,
)


def serve_devices(
    kind: str, count: int, layers: int, blocks: Sequence[int], settings: Sequence[Setting]
) -> list[list[Served]]:
    """What each of `count` ranks served under each setting.

    Raises what a rank raised, and RuntimeError for a rank that died.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(count, mp_context=context) as pool:
        work = partial(
            _serve_on_device,
            kind=kind,
            count=count,
            store=Path(folder, "store").as_uri(),
            layers=layers,
            blocks=tuple(blocks),
            settings=tuple(settings),
        )
        return list(pool.map(work, range(count)))


def _serve_on_device(
    rank: int,
    *,
    kind: str,
    count: int,
    store: str,
    layers: int,
    blocks: Sequence[int],
    settings: Sequence[Setting],
) -> list[Served]:
    """One rank, on the device of its number; all of this in the order in which an engine's worker does it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    torch.set_num_threads(1)
    find_accelerator()
    if uses_nccl(kind):
        prepare_nccl()
    torch.accelerator.set_device_index(rank)
    device = Device(torch.device(kind, rank))
    limit = datetime.timedelta(seconds=PATIENCE)
    backend = group_backend(kind)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count, timeout=limit)
    everyone = range(count)
    engine: dist.ProcessGroup = dist.new_group(list(everyone), timeout=limit)
    warm_up(engine, everyone, device.torch)
    group = new_group(everyone, kind, timeout=PATIENCE)
    warm_up(group, everyone, device.torch)
    transport = ProcessGroupTransport(group, everyone)
    served = [serve(transport, device, layers, blocks, setting, group=engine) for setting in settings]
    transport.agree(b"done")  # leave together
    return served

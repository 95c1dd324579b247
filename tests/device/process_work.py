"""Ranks that are real processes, each with a test device of its own, over a collective of that device."""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from kvpp_dag.runtime import ProcessGroupTransport
from tests.device.build import COLLECTIVES, NAME, load_test_device
from tests.device.device import Device
from tests.device.ranks import PATIENCE, Served, Setting, serve


def join_processes(rank: int, *, folder: str, library: str, size: int) -> Device:
    """Load the test device into this process, which joins a group of `size` that meet in `folder`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    load_test_device(Path(library))
    dist.init_process_group(
        f"cpu:gloo,{NAME}:{COLLECTIVES}",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    return Device(torch.device(NAME, 0), simulated=True)


def serve_in_process(
    rank: int,
    *,
    folder: str,
    library: str,
    size: int,
    layers: int,
    blocks: Sequence[int],
    settings: Sequence[Setting],
) -> list[Served]:
    """Serve as one rank of a group of processes, once per setting."""
    device = join_processes(rank, folder=folder, library=library, size=size)
    transport = ProcessGroupTransport(dist.group.WORLD, range(size))
    served = [serve(transport, device, layers, blocks, setting) for setting in settings]
    transport.agree(b"done")  # leave together
    return served

"""Ranks that are real processes with a test device of their own, and run the self check."""

import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist

from kvpp_dag.errors import KvppError
from kvpp_dag.runtime import ProcessGroupTransport
from tests.device.build import COLLECTIVES, NAME, load_test_device
from tests.device.device import Device
from tests.device.ranks import PATIENCE
from tests.device.self_check_ranks import Check, run_check


def check_in_process(
    rank: int, *, folder: str, library: str, size: int, checks: dict[str, Check], figures: bool = False
) -> dict[str, str]:
    """What one rank of a group of processes says of each self check; with `figures`, the seconds that it took."""
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
    device = Device(torch.device(NAME, 0), simulated=True)
    said = {}
    for name, check in checks.items():
        transport = ProcessGroupTransport(dist.group.WORLD, range(size))
        try:
            checked = run_check(transport, device, check)[0]
            said[name] = str(checked.seconds) if figures else f"passed: {checked.text()}"
        except KvppError as error:
            said[name] = f"{type(error).__name__}: {error}"
    transport.agree(b"done")  # leave together
    return said

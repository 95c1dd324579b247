"""Process groups for KVPP's broadcasts: made alike everywhere, and used once before they are needed."""

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from kvpp_dag.runtime.nccl import nccl_options
from kvpp_dag.runtime.vendors import group_backend, uses_nccl


def new_group(ranks: Sequence[int], device_type: str, *, timeout: float) -> dist.ProcessGroup:
    """A group of `ranks` (global) for caches on such devices; `timeout` (seconds) bounds every collective.

    All of its ranks have to make it, and no others. Raises ConfigError for a device type that KVPP does not know.
    """
    group: dist.ProcessGroup = dist.new_group(
        list(ranks),
        timeout=datetime.timedelta(seconds=timeout),
        backend=group_backend(device_type),
        pg_options=nccl_options() if uses_nccl(device_type) else None,
        use_local_synchronization=True,
    )
    return group


def warm_up(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
    """Let every rank send once, and wait for it.

    An accelerator's library connects ranks, loads kernels and takes memory when they are first used, and while
    it does must not meet the engine's collectives.
    """
    token = torch.zeros(1, device=device)
    for owner in ranks:
        dist.broadcast(token, owner, group)
    torch.accelerator.synchronize(device)

"""Which transport the ranks of a KVPP group use: decided once, by all of them together."""

import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from kvpp_dag.errors import ConfigError
from kvpp_dag.runtime import (
    ProcessGroupTransport,
    SharedMemoryTransport,
    Transport,
    gather_bytes,
    group_backend,
    host_identity,
    new_group,
    warm_up,
)
from kvpp_vllm.config import KvppConfig, TransportKind

logger = logging.getLogger("vllm.kvpp")

CPU_GROUPS = 2
"""Process groups between caches in a host's memory, if none are asked for."""


def make_transport(
    config: KvppConfig, ranks: Sequence[int], *, device: torch.device | str = "cpu"
) -> Transport:
    """The transport between `ranks` (global), made by all of them together, for caches on `device`.

    `auto` is shared memory where all ranks say that they run on one host, with caches in its memory, and
    process groups elsewhere. Raises ConfigError if shared memory, or more than one process group, is asked
    for and cannot serve, and TransferError if a rank does not come.
    """
    device = torch.device(device)
    groups = _group_count(config, device)
    group = new_group(ranks, device.type, timeout=config.timeout_s)
    if _shares_memory(config, group, ranks, device):
        logger.info("KVPP sends through shared memory (transport: %s).", config.transport)
        return SharedMemoryTransport(
            partial(gather_bytes, group, ranks),
            rank=list(ranks).index(dist.get_rank()),
            ranks=ranks,
            timeout=config.timeout_s,
        )
    logger.info(
        "KVPP sends over %d process group(s) of %s (transport: %s).",
        groups,
        group_backend(device.type),
        config.transport,
    )
    if device.type != "cpu":
        warm_up(group, ranks, device)
    more = [new_group(ranks, device.type, timeout=config.timeout_s) for _ in range(groups - 1)]
    return ProcessGroupTransport(group, ranks, more_groups=more)


def _group_count(config: KvppConfig, device: torch.device) -> int:
    """How many process groups there are to be. Raises ConfigError for more than `device` can have."""
    if device.type == "cpu":
        return CPU_GROUPS if config.process_groups is None else config.process_groups
    # An accelerator's collectives use the whole link as they are, and several at once can block each other.
    if config.process_groups not in (None, 1):
        raise ConfigError(
            f"additional_config.kvpp.process_groups is {config.process_groups}, but the caches are on "
            f"{device}, where transfers of several process groups can block each other; set it to 1 or leave "
            "it out."
        )
    return 1


def _shares_memory(
    config: KvppConfig, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device
) -> bool:
    """The same answer on every rank: settings are equal everywhere, and the hosts are compared by all."""
    if config.transport is TransportKind.PROCESS_GROUP:
        return False
    one_host = len(set(gather_bytes(group, ranks, host_identity()))) == 1
    serves = one_host and device.type == "cpu"
    if config.transport is TransportKind.SHARED_MEMORY and not serves:
        raise ConfigError(
            f"additional_config.kvpp.transport is shared_memory, but the ranks {list(ranks)} do not all run on "
            f"one Linux host, in one network namespace and as one user, with caches on the CPU (this one: "
            f"{device}); set it to auto or process_group."
        )
    return serves

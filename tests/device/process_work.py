"""Ranks that are real processes, each with a test device of its own, over a collective of that device."""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from kvpp_dag.runtime import ProcessGroupTransport
from tests.device.device import Device, launch_on_test_device, load_test_device
from tests.device.ranks import PATIENCE, Served, Setting, serve


class DeviceCollectives(dist.ProcessGroup):
    """As `cpu:gloo,<device>:<library>`: gloo for host tensors, stream-ordered broadcasts for the device's.

    A broadcast is submitted to the stream that is current, and returns at once, as NCCL's does.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self.host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, timeout)
        self.device = dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return "kvppccl"

    def allgather(self, outputs, inputs, options):
        return self.host.allgather(outputs, inputs, options)

    def broadcast(self, tensors, options):
        (tensor,) = tensors
        assert tensor.device.type == "kvppdev"
        aliases = [torch.ops.kvpp_device.host(tensor)]
        launch_on_test_device(lambda: self.device.broadcast(aliases, options).wait())
        return Submitted()


class Submitted(dist.Work):
    """What a stream-ordered collective returns: there is nothing to wait for on the host."""

    def wait(self, timeout=None):
        return True


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
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    load_test_device(Path(library))
    dist.Backend.register_backend("kvppccl", DeviceCollectives, devices=["kvppdev", "cpu"])
    dist.init_process_group(
        "kvppccl",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    device = Device(torch.device("kvppdev", 0), simulated=True)
    transport = ProcessGroupTransport(dist.group.WORLD, range(size))
    served = [serve(transport, device, layers, blocks, setting) for setting in settings]
    transport.agree(b"done")  # leave together
    return served

"""Ranks that are real processes with a test device of their own, and run the self check."""

import torch.distributed as dist

from kvpp_dag.errors import KvppError
from kvpp_dag.runtime import ProcessGroupTransport
from tests.device.process_work import join_processes
from tests.device.self_check_ranks import Check, run_check


def check_in_process(
    rank: int, *, folder: str, library: str, size: int, checks: dict[str, Check], figures: bool = False
) -> dict[str, str]:
    """What one rank of a group of processes says of each self check; with `figures`, the seconds that it took."""
    device = join_processes(rank, folder=folder, library=library, size=size)
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

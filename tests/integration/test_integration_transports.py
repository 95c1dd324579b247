"""Which transport ranks choose: equal on all of them, by host and by settings. Real processes over gloo."""

import logging
import os
from functools import partial

import pytest
import torch

from kvpp_dag.errors import ConfigError
from kvpp_dag.runtime import ProcessGroupTransport, SharedMemoryTransport, groups
from kvpp_vllm import transports
from kvpp_vllm.config import KvppConfig
from tests.runtime_support import run_processes


def choose(transport, settings, *, hosts=1, device="cpu"):
    """The chosen transport's name, its number of groups, what was logged, and what a broadcast brought."""
    if hosts > 1:
        transports.host_identity = lambda: os.getpid().to_bytes(32, "big")
    if device != "cpu":  # what an accelerator's build of torch would do is left out
        groups.group_backend = lambda device_type: "gloo"
        groups.uses_nccl = lambda device_type: False
        transports.warm_up = lambda group, ranks, device: None
    lines = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())
    transports.logger.addHandler(handler)
    transports.logger.setLevel(logging.INFO)
    made = transports.make_transport(KvppConfig(**settings), list(transport.ranks), device=device)
    allocate = getattr(made, "allocate", partial(torch.zeros, dtype=torch.uint8))
    view = allocate(64).fill_(5 + made.rank)
    made.prepare(view, 1)()
    made.agree(b"x")
    return type(made), len(getattr(made, "groups", ())), lines, view.unique().tolist()


SHARED = (SharedMemoryTransport, 0)
CASES = {
    "auto, one host": ({}, {}, SHARED),
    "auto, two hosts": ({}, {"hosts": 2}, (ProcessGroupTransport, 2)),
    "auto, an accelerator": ({}, {"device": "cuda"}, (ProcessGroupTransport, 1)),
    "one group, an accelerator": (
        {"process_groups": 1},
        {"device": "cuda"},
        (ProcessGroupTransport, 1),
    ),
    "shared memory, one host": ({"transport": "shared_memory"}, {}, SHARED),
    "process group, one host": ({"transport": "process_group"}, {}, (ProcessGroupTransport, 2)),
    "four groups": (
        {"transport": "process_group", "process_groups": 4},
        {"hosts": 2},
        (ProcessGroupTransport, 4),
    ),
}


@pytest.mark.parametrize(("settings", "circumstances", "expected"), CASES.values(), ids=CASES)
def test_all_ranks_choose_alike_and_say_so(settings, circumstances, expected):
    results = run_processes(2, partial(choose, settings=settings, **circumstances))
    for result in results:
        assert isinstance(result, tuple), result
        kind, groups, lines, arrived = result
        assert (kind, groups) == expected
        assert arrived == [6]
        (line,) = [line for line in lines if line.startswith("KVPP sends")]
        assert ("shared memory" in line) == (kind is SharedMemoryTransport)


@pytest.mark.parametrize("circumstances", [{"hosts": 2}, {"device": "cuda"}])
def test_shared_memory_that_cannot_serve_is_refused_on_every_rank(circumstances):
    work = partial(choose, settings={"transport": "shared_memory"}, **circumstances)
    for result in run_processes(2, work):
        assert isinstance(result, ConfigError)
        assert "set it to auto or process_group" in str(result)


@pytest.mark.parametrize("groups", [2, 4])
def test_process_groups_that_cannot_be_had_are_refused_on_every_rank(groups):
    work = partial(choose, settings={"process_groups": groups}, device="cuda")
    for result in run_processes(2, work):
        assert isinstance(result, ConfigError), result
        assert f"kvpp.process_groups is {groups}, but the caches are on cuda" in str(result)

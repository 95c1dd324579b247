"""Make a slow forward on purpose: `python docs/overlap_cases.py CASE DIR [--payload ...] [--policy ...] [--depth ...]`.

Two processes run the real runtime, with real buffers that gloo sends over the loopback interface, and leave
their recordings in DIR. Only the compute is made up: it sleeps for the times that `CASES` states, since compute
on the same cores would slow the sending down, which on an accelerator it does not. docs/debugging-overlap.md
reads what comes out.
"""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import typer

from kvpp_dag.graph import Policy
from kvpp_dag.plan import CacheSpec, Component, plan_stage
from kvpp_dag.runtime import Arena, ForwardPass, Payload, ProcessGroupTransport, make_streams
from kvpp_dag.trace import Recorder, Recording
from kvpp_dag.trace.recording import to_recording_json

RANKS = 2
LAYERS = 12
FORWARDS = 8
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of the cache, and seconds of compute: attention, and the rest of layer 0, 1, ..., in turn."""

    blocks: int
    used_blocks: int
    bytes_per_block: int
    attention: float
    others: tuple[float, ...]


CASES = {
    # 64 MiB a layer beside 16 ms of compute; a twentieth of the blocks holds the history of the batch.
    "bandwidth": Case(
        blocks=2048, used_blocks=100, bytes_per_block=32_768, attention=0.001, others=(0.015,)
    ),
    # 16 MiB a layer beside 40 ms on average, but layers take 77 and 3 ms in turn, as where expensive layers
    # stand between cheap ones.
    "late": Case(
        blocks=1024, used_blocks=1024, bytes_per_block=16_384, attention=0.001, others=(0.076, 0.002)
    ),
}


def main(
    case: Annotated[str, typer.Argument(help=" or ".join(CASES))],
    directory: Annotated[Path, typer.Argument(help="A new directory for the recordings.")],
    payload: Payload = Payload.FULL,
    policy: Policy = Policy.ON_ACQUIRE,
    depth: int = 1,
) -> None:
    """Run one case and leave a recording per rank."""
    if case not in CASES:
        raise typer.BadParameter(f"expected {' or '.join(CASES)}, found {case!r}")
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (CASES[case], directory, payload, policy, depth, Path(scratch) / "store")
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=RANKS)


def run_rank(
    rank: int, case: Case, directory: Path, payload: Payload, policy: Policy, depth: int, store: Path
) -> None:
    """What one process does: forwards as an engine would run them, and then its recording."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=rank, world_size=RANKS)
    group = dist.new_group(list(range(RANKS)), backend="gloo")
    specs = [
        CacheSpec(
            layer=f"model.layers.{i}.attn",
            index=i,
            components=(Component(name="main", bytes_per_block=case.bytes_per_block),),
        )
        for i in range(LAYERS)
    ]
    plan = plan_stage(specs, ranks=RANKS, depth=depth, staging=payload is not Payload.FULL)
    streams = make_streams(torch.device("cpu"), timeout=TIMEOUT_S)
    recorder = Recorder()
    forward = ForwardPass(
        arena=Arena(plan, rank=rank, num_blocks=case.blocks),
        transport=ProcessGroupTransport(group, range(RANKS)),
        compute=streams.compute,
        transfer=streams.transfer,
        copy=streams.copy,
        policy=policy,
        payload=payload,
        observer=recorder,
    )
    for _ in range(1 + FORWARDS):
        run_forward(forward, case)
    recording = Recording(
        rank=rank,
        ranks=RANKS,
        stage=0,
        clock="this host",
        num_blocks=case.blocks,
        plan=plan,
        forwards=recorder.forwards[1:],  # the first touches its memory for the first time
    )
    (directory / f"recording.stage0.rank{rank}.json").write_text(to_recording_json(recording))
    dist.barrier()
    dist.destroy_process_group()


def run_forward(forward: ForwardPass, case: Case) -> None:
    """One forward with history, whose blocks lie scattered over the cache."""
    used = np.linspace(0, case.blocks - 1, case.used_blocks).astype(np.int64)
    forward.begin(history=True, used=used)
    time.sleep(case.attention)
    for layer in range(LAYERS):
        forward.acquire(layer)
        time.sleep(case.attention)
        forward.release(layer)
        time.sleep(case.others[layer % len(case.others)])
    forward.end()


if __name__ == "__main__":
    typer.run(main)

"""Requests that come and go while others run, on real vLLM in a process of its own, step by step.

The engine core runs in the process that drives it, so a workload's steps, batches and aborts are the same on every
run, and two runs with as many blocks compute the same batches.
"""

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support import gpu_platform, sparse_models
from tests.support.stock_fixes import plugin
from tests.support.triton_cpu import model_runner_v2
from tests.support.vllm_cpu import kill_group, start_in_own_group

SEPARATOR = "=== workload starts ===\n"
"""What the child writes into the log before each workload."""

THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""One thread a worker, wherever it runs: see `workload_run.import_once_for_all_workers`."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One greedy request of exactly `max_tokens` new tokens.

    arrival: the step of its round before which it is added.
    abort_after: new tokens after which it is aborted, at the end of the step that brought them; 0 aborts it one
        step after its arrival, whatever it has.
    """

    prompt: Sequence[int]
    max_tokens: int
    arrival: int = 0
    abort_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One engine and what is asked of it.

    rounds: one after the other, each until nothing is left to do.
    sleep_between: put the engine to sleep and wake it up between rounds.
    workers: processes of the engine: tensor parallel size times pipeline stages.
    runner: 1 or 2, for Model Runner V1 or V2.
    sparse: the model is one of `sparse_models`, whose kernels are test support's.
    device: the library of the test device, on which the engine then runs with vLLM's GPU worker; see `gpu_platform`.
    faults: on a test device, for each round in order, the fields of the `gpu_platform.Faults` that act from then on.
    refused: the engine is not to start; then nothing is asked of it, and the outcome's log says why.
    before: a function of one argument, as "module:name", called with the worker in every worker before the rounds.
    engine, environment, restore, rpc: as in `EngineSpec`.
    """

    model: str
    rounds: Sequence[Sequence[Request]]
    workers: int = 2
    runner: int = 1
    sparse: bool = False
    device: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    restore: Sequence[str] = ()
    sleep_between: bool = False
    refused: bool = False
    before: str | None = None
    faults: Sequence[dict[str, Any]] = ()
    rpc: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Covered:
    """What a run met, counted over the scheduler's own steps, forwards that it scheduled only.

    forwards: batches with tokens; with_history: those in which a request had computed tokens;
    mixed: those that held a prompt's chunk and a decode; chunks: parts of prompts that were not the last one.
    prefix_hits: requests that started with cached tokens; resumed: requests scheduled again after a preemption.
    in_flight: the most batches that were launched and not yet answered.
    aborted: requests; aborted_in_flight: those aborted while a batch with them was launched and not yet answered.
    used_blocks: blocks that hold computed tokens of a batch's requests, by the scheduler's own tables: distinct ones,
        added up over the forwards.
    """

    requests: int
    forwards: int
    with_history: int
    mixed: int
    chunks: int
    prefix_hits: int
    preemptions: int
    resumed: int
    in_flight: int
    aborted: int
    aborted_in_flight: int
    used_blocks: int

    def text(self) -> str:
        """One line."""
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """tokens: new tokens of each request, in the order of the rounds; those of aborted ones until then.

    num_blocks: KV blocks of the scheduler. async_scheduling: as the engine has it after all its checks.
    drafts: the draft tokens that the scheduler gave to each step, None for placeholders under asynchronous scheduling.
    accepted: of those drafts. slept: how often the engine said it was asleep.
    rpc[method]: one value a worker. log: stdout and stderr of the engine and its workers.
    """

    tokens: list[list[int]]
    num_blocks: int
    async_scheduling: bool
    covered: Covered
    drafts: list[list[int]]
    accepted: int
    slept: int
    rpc: dict[str, list[Any]]
    log: str


def run_workloads(workloads: Sequence[Workload], *, timeout_s: float = 840) -> list[Outcome]:
    """Run `workloads` one after the other in a new process, which imports vLLM once for all of them.

    They share `workers`, `runner`, `sparse`, `device`, `environment` and `restore`. Raises RuntimeError, with the end
    of the log, where one does not finish.
    """
    first = workloads[0]
    if any(_process(other) != _process(first) for other in workloads):
        raise ValueError(
            "The workloads of one process must share workers, runner, sparse, device, environment and restore."
        )
    with tempfile.TemporaryDirectory(prefix="kvpp-workload-") as scratch:
        place = Path(scratch)
        (place / "workloads.json").write_text(json.dumps([asdict(workload) for workload in workloads]))
        command = [sys.executable, "-m", "tests.support.workload_run"]
        command += [str(place / "workloads.json"), str(place / "outcomes.json")]
        extra = first.environment | THREADS | {"PYTHONPATH": str(place / "plugin")}
        if first.device is None:
            plugin(place / "plugin")  # work-arounds for the CPU's worker
        else:
            extra |= gpu_platform.environment(place / "plugin", first.device)
        if first.runner == 2:
            extra |= model_runner_v2(place / "plugin")
        if first.sparse:
            kernels = "sparse_cpu" if first.device is None else "gpu_platform.sparse"
            sparse_models.plugin(place / "plugin", f"tests.support.{kernels}")
        with (place / "log.txt").open("wb") as log:
            process = start_in_own_group(command, first.workers, extra, log)
            try:
                process.wait(timeout_s)
            finally:
                kill_group(process)
        text = (place / "log.txt").read_text(errors="replace")
        if process.returncode != 0:
            raise RuntimeError(
                f"The workloads' process exited with {process.returncode}; its log ends:\n{text[-6000:]}"
            )
        found = json.loads((place / "outcomes.json").read_text())
    logs = text.split(SEPARATOR)[1:]
    return [
        Outcome(**one | {"covered": Covered(**one["covered"])}, log=log)
        for one, log in zip(found, logs, strict=True)
    ]


def _process(workload: Workload) -> tuple[Any, ...]:
    """What workloads of one process have in common."""
    return (
        workload.workers,
        workload.runner,
        workload.sparse,
        workload.device,
        workload.environment,
        workload.restore,
    )


def off_on_control(workload: Workload) -> tuple[Outcome, Outcome, Outcome]:
    """Run `workload` with KVPP off, on with the figures of every worker, and on with broadcasts skipped."""
    off, on, control = run_workloads(
        [kvpp(workload, None), kvpp(workload, {}), kvpp(workload, {"skip_broadcasts": True})]
    )
    return off, on, control


def kvpp(workload: Workload, settings: dict[str, Any] | None, **changes: Any) -> Workload:
    """`workload` with KVPP off (None), or on with `settings` and the figures of every worker."""
    if settings is None:
        return replace(workload, **changes)
    additional = {"enable_kvpp": True, "kvpp": settings}
    engine = workload.engine | {"additional_config": additional}
    return replace(workload, engine=engine, rpc=["kvpp_stats"], **changes)


def together(prompts: Sequence[Sequence[int]], *, max_tokens: int) -> list[Request]:
    """One round of requests that all arrive at once and run to their end."""
    return [Request(prompt=prompt, max_tokens=max_tokens) for prompt in prompts]


def random_requests(count: int, *, seed: int, longest: int) -> list[Request]:
    """Random lengths, arrivals, shared prefixes and aborts; no request exceeds `longest` tokens in all."""
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(2, 300) for _ in range(n)]

    shared = [tokens(n) for n in (16, 32, 48, 80)]
    requests, arrival = [], 0
    for _ in range(count):
        arrival += rng.choice((0, 0, 0, 1, 2, 5))
        prompt = list(rng.choice(shared)) if rng.random() < 0.5 else []
        prompt += tokens(rng.randint(1, longest // 3))
        max_tokens = rng.randint(1, min(24, longest - len(prompt)))
        abort_after = rng.randrange(max_tokens) if rng.random() < 0.2 else None
        requests.append(
            Request(prompt=prompt, max_tokens=max_tokens, arrival=arrival, abort_after=abort_after)
        )
    return requests

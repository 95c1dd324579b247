"""Runs engines of vllm-ascend on the stand-in torch_npu, in a process of their own.

`STACKS` has the versions of vLLM and vllm-ascend that `make test-npu` puts beside the environment, by the name of their
folder. The engine lives in the child process, and its workers are forked from it once the worker has been imported.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.vllm_cpu import kill_group
from tests.support.workload import SEPARATOR, Covered, Request

REPOSITORY = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("stand_in")
STACKS = Path(sys.prefix) / "stacks"
RELEASED, OWN_KVPP = "0.23", "0.30"
BLOCK_TOKENS = 128
"""Tokens in a block: the only size that vllm-ascend's attention has."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine and what is asked of it, all requests greedy and with logprobs.

    rounds: one after the other, each until nothing is left to do. arguments: of `vllm.LLM`, which replace or join
    the usual ones. additional: of its additional_config. kvpp: settings of KVPP, None for off.
    faults: names of `faults.FAULTS`. rpc: methods of the worker, called on every rank after the last round.
    """

    model: str
    rounds: Sequence[Sequence[Request]]
    arguments: dict[str, Any] = field(default_factory=dict)
    additional: dict[str, Any] = field(default_factory=dict)
    kvpp: dict[str, Any] | None = None
    faults: Sequence[str] = ()
    rpc: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """tokens and logprobs: of each request, in the order of the rounds; those of aborted ones until then.

    blocks: of the scheduler. drafts: what the scheduler gave to each step. accepted: of those drafts.
    operators: of the stand-in, how often each ran on rank 0. rpc[method]: one value a rank. log: of engine and workers.
    error: what it ended with; the other fields are then empty.
    """

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    blocks: int = 0
    covered: Covered | None = None
    async_scheduling: bool = False
    drafts: list[list[int]] = field(default_factory=list)
    accepted: int = 0
    operators: dict[str, int] = field(default_factory=dict)
    rpc: dict[str, list[Any]] = field(default_factory=dict)
    log: str = ""
    error: str | None = None


def run_engines(
    engines: Sequence[Engine],
    *,
    library: Path,
    stack: str = RELEASED,
    environment: dict[str, str] | None = None,
    timeout_s: float = 900,
) -> list[Outcome]:
    """Run `engines` one after the other in a new process. One that fails comes back with `error`.

    Raises RuntimeError, with the end of the log, where the process does not finish.
    """
    with tempfile.TemporaryDirectory(prefix="kvpp-npu-") as scratch:
        place = Path(scratch)
        (place / "engines.json").write_text(json.dumps([asdict(engine) for engine in engines]))
        command = [sys.executable, "-m", "tests.npu.engine_run"]
        command += [str(place / "engines.json"), str(place / "outcomes.json")]
        variables = os.environ | engine_variables(stack, library) | (environment or {})
        with (place / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass  # told below, with the log
            finally:
                kill_group(process)
        text = (place / "log.txt").read_text(errors="replace")
        if process.returncode != 0:
            raise RuntimeError(
                f"The engines' process ended with {process.returncode}; its log ends:\n{text[-6000:]}"
            )
        found = json.loads((place / "outcomes.json").read_text())
    logs = text.split(SEPARATOR)[1:]
    return [_outcome(one, log) for one, log in zip(found, logs, strict=True)]


def off_on_control(
    engine: Engine, settings: dict[str, Any], **named: Any
) -> tuple[Outcome, Outcome, Outcome]:
    """Run `engine` with KVPP off, on with `settings` and every rank's figures, and on with nothing sent."""
    on = replace(engine, kvpp=settings, rpc=["kvpp_stats"])
    control = replace(engine, kvpp=settings | {"skip_broadcasts": True})
    off, on_, control_ = run_engines([replace(engine, kvpp=None), on, control], **named)
    return off, on_, control_


def same(one: Outcome, other: Outcome) -> int:
    """How many requests have the same tokens and the same logprobs, to the bit. Raises AssertionError for an error."""
    for outcome in (one, other):
        assert outcome.error is None, f"{outcome.error}\n" + "\n".join(_telling(outcome.log))
    assert len(one.tokens) == len(other.tokens) > 0
    pairs = zip(one.tokens, one.logprobs, other.tokens, other.logprobs, strict=True)
    return sum(a == c and b == d for a, b, c, d in pairs)


def _telling(log: str) -> list[str]:
    """The lines that may say why an engine has failed."""
    return [line[-300:] for line in log.splitlines() if "Error" in line or "error:" in line][-12:]


def _outcome(found: dict[str, Any], log: str) -> Outcome:
    if found.get("covered") is not None:
        found["covered"] = Covered(**found["covered"])
    return Outcome(**found, log=log)


def engine_variables(stack: str, library: Path) -> dict[str, str]:
    """The environment of an engine: the paths, and what keeps runs alike."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, STAND_IN, STACKS / stack))),
        "KVPP_TEST_NPU_LIBRARY": str(library),
        # vllm-ascend reads the version of a distribution called vllm, and this one is vllm-cpu.
        "VLLM_VERSION": f"{stack}.0",
        # With the engine in a process of its own, which requests share a batch depends on timing.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "COMPILE_CUSTOM_KERNELS": "0",
        "OMP_NUM_THREADS": "1",
    }

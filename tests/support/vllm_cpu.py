"""Run stock vLLM 0.32 on this machine's CPU in a process of its own, for tests.

vLLM's CPU platform switches chunked prefill, prefix caching and asynchronous scheduling off for MLA, although the
code paths below it work. `restore_scheduling` puts back what a test asks for; nothing else of vLLM is changed.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvpp_vllm.demo.engine import environment

REPOSITORY = Path(__file__).resolve().parents[2]

RESTORABLE = {
    "chunked_prefill": (
        ("scheduler_config", "enable_chunked_prefill"),
        ("scheduler_config", "max_num_batched_tokens"),
    ),
    "prefix_caching": (("cache_config", "enable_prefix_caching"),),
    "async_scheduling": (("scheduler_config", "async_scheduling"),),
    "compilation": (("compilation_config", "mode"), ("compilation_config", "backend")),
}
"""Feature → the fields of `VllmConfig` that `CpuPlatform.check_and_update_config` overwrites, as (part, field)."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One run of `vllm.LLM`: greedy, every request to exactly `max_tokens` new tokens.

    rounds: batches run one after the other; each a list of prompts, each a list of token ids.
    engine: keyword arguments of `vllm.LLM` that replace or join the demo's `engine_arguments`.
    environment: variables that replace or join the demo's `environment`; PYTHONPATH is searched after this repository.
    restore: names of `RESTORABLE` that stay as `engine` sets them. Those parts of the configuration reach
        the workers with the configuration, so only the process of `vllm.LLM` needs the change.
    before: for each round, in order, methods of the worker that are called on every rank before it; may be shorter.
    rpc: methods of the worker, called without arguments on every rank after the last round.
    """

    model: str
    rounds: Sequence[Sequence[Sequence[int]]]
    max_tokens: int = 16
    ranks: int = 2
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    restore: Sequence[str] = ()
    logprobs: bool = False
    before: Sequence[Sequence[str]] = ()
    rpc: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """What a run gave. With `error` set, the other fields hold what was known before it.

    tokens[round][request]: generated ids; logprobs: of those tokens, with `EngineSpec.logprobs`.
    cached_tokens[round][request]: prompt tokens found in the prefix cache.
    num_blocks: KV blocks the scheduler has, the null block included.
    preemptions: of all rounds together.
    rpc[method]: one value a rank, as JSON keeps it (repr of what JSON has no form for).
    log: stdout and stderr of the engine and its workers.
    """

    error: str | None = None
    tokens: list[list[list[int]]] = field(default_factory=list)
    logprobs: list[list[list[float]]] = field(default_factory=list)
    cached_tokens: list[list[int]] = field(default_factory=list)
    num_blocks: int | None = None
    preemptions: int | None = None
    rpc: dict[str, list[Any]] = field(default_factory=dict)
    log: str = ""


def run_engine(spec: EngineSpec, *, timeout_s: float = 180) -> EngineResult:
    """Run `spec` in a new process and return its result; an exception there, or a timeout, comes back as `error`."""
    if unknown := sorted(set(spec.restore) - set(RESTORABLE)):
        raise ValueError(
            f"restore names {', '.join(unknown)}, but only {', '.join(RESTORABLE)} can be restored."
        )
    with tempfile.TemporaryDirectory(prefix="kvpp-engine-") as scratch:
        spec_path, result_path, log_path = (
            Path(scratch) / name for name in ("spec.json", "result.json", "log.txt")
        )
        spec_path.write_text(json.dumps(asdict(spec)))
        command = [sys.executable, "-m", "tests.support.engine_run", str(spec_path), str(result_path)]
        with log_path.open("wb") as log:
            process = start_in_own_group(command, spec.ranks, spec.environment, log)
        ended = _wait_and_end_group(process, timeout_s)
        text = log_path.read_text(errors="replace")
        found: dict[str, Any] = json.loads(result_path.read_text()) if result_path.exists() else {}
    if not ended:
        found["error"] = (
            f"The engine did not finish within {timeout_s} s and was killed; its log ends:\n{text[-2000:]}"
        )
    elif not found:
        found["error"] = (
            f"The engine process exited with {process.returncode} and no result; its log ends:\n{text[-2000:]}"
        )
    return EngineResult(**found, log=text)


def restore_scheduling(features: Sequence[str]) -> None:
    """Make `CpuPlatform.check_and_update_config` leave `features` (of `RESTORABLE`) as the arguments set them."""
    from vllm.platforms.cpu import CpuPlatform

    fields = [place for feature in features for place in RESTORABLE[feature]]
    stock = CpuPlatform.check_and_update_config

    @functools.wraps(stock)
    def check_and_update_config(vllm_config: Any) -> None:
        asked = [getattr(getattr(vllm_config, part), name) for part, name in fields]
        stock(vllm_config)
        for (part, name), value in zip(fields, asked, strict=True):
            setattr(getattr(vllm_config, part), name, value)

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def with_known_payload(engine: dict[str, Any]) -> dict[str, Any]:
    """`engine` with whole bundles sent where it has KVPP on and says nothing: then a test knows what has to be sent.

    KVPP_TEST_PAYLOAD replaces `full`, to run tests of anything else with another payload.
    """
    additional = engine.get("additional_config", {})
    if not additional.get("enable_kvpp"):
        return engine
    settings = {"payload": os.environ.get("KVPP_TEST_PAYLOAD", "full")} | additional.get("kvpp", {})
    return engine | {"additional_config": additional | {"kvpp": settings}}


def start_in_own_group(
    command: Sequence[str], ranks: int, extra: dict[str, str], log: Any
) -> subprocess.Popen[bytes]:
    """Start `command` from the repository root as the leader of a process group of its own, output to `log`."""
    paths = [str(REPOSITORY), extra.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    variables = (
        os.environ
        | environment(ranks=ranks)
        | extra
        | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    )
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process group that `start_in_own_group` started, workers included."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_and_end_group(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the leader and then end its whole group; return whether the leader ended by itself in time."""
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        kill_group(process)

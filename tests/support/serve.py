"""`vllm serve` on this machine's CPU as a process of its own, for tests over HTTP."""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from kvpp_vllm.demo.engine import engine_arguments
from tests.support.vllm_cpu import kill_group, start_in_own_group


class ServerError(Exception):
    """The server did not come up, or left processes behind."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers. url: without a trailing slash. log: its stdout and stderr, the workers' included."""

    url: str
    model: str
    log: Path

    def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int = 16, timeout_s: float = 60
    ) -> dict[str, Any]:
        """POST a greedy completion of exactly `max_tokens` tokens to /v1/completions and return the decoded answer."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


@contextmanager
def serve(
    model: Path, log: Path, *, ranks: int = 2, arguments: Sequence[str] = (), timeout_s: float = 180
) -> Iterator[Server]:
    """Run `vllm serve MODEL` with the demo's settings and `arguments` until the block ends; all its processes end too.

    Raises `ServerError` with the end of the log when /health does not answer within `timeout_s`.
    """
    port = _free_port()
    settings = engine_arguments(model, ranks=ranks)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", settings.pop("model")]
    command += [*_options(settings), "--host", "127.0.0.1", "--port", str(port), *arguments]
    with tempfile.TemporaryDirectory(prefix="kvpp-serve-") as scratch:
        _name_distribution(Path(scratch))
        with log.open("wb") as output:
            process = start_in_own_group(command, ranks, {"PYTHONPATH": scratch}, output)
        try:
            server = Server(url=f"http://127.0.0.1:{port}", model=str(model), log=log)
            _wait_for_health(server, process, timeout_s)
            yield server
        finally:
            _end(process)


def _name_distribution(directory: Path) -> None:
    """Let `importlib.metadata` find "vllm" in `directory` where only "vllm-cpu" is installed.

    The command line of vLLM 0.32 asks for the version under the first name alone, and ends with
    PackageNotFoundError under the second. The suffix +cpu is how vLLM recognises its CPU build.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        found = f"{version('vllm-cpu')}+cpu"
        info = directory / f"vllm-{found}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")


def _options(settings: dict[str, Any]) -> list[str]:
    """Spell keyword arguments of `vllm.LLM` as options of `vllm serve`."""
    options: list[str] = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        options += [option] if value is True else [option, str(value)]
    return options


def _wait_for_health(server: Server, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        text = server.log.read_text(errors="replace")
        # With its engine dead during start-up, the server neither answers nor exits.
        if process.poll() is not None or "EngineDeadError" in text:
            raise ServerError(
                f"vllm serve failed before it answered /health; its log ends:\n{text[-4000:]}"
            )
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    tail = server.log.read_text(errors="replace")[-4000:]
    raise ServerError(f"vllm serve did not answer /health within {timeout_s} s; its log ends:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, then kill what is left of it, and check that no worker outlives it."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    kill_group(process)
    _, alive = psutil.wait_procs(family, timeout=10)
    if alive:
        raise ServerError(
            f"Processes {[member.pid for member in alive]} of vllm serve are still running after it ended."
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port

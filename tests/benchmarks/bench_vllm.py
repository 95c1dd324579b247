"""Real vLLM on a CPU with KVPP off and on: time to first token, prefill and decode, at several KV budgets.

The engines that are compared are alive at the same time and take turns; the others sleep. The model is the demo's, but
wider, so that there is some compute to every cached byte: still a thousandth of a real model's.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvpp_vllm.demo.checkpoint import build_tokenizer, model_config, model_weights
from tests.benchmarks.rows import Bar, Row, make_row
from tests.support.checkpoints import write_model
from tests.support.stock_fixes import plugin
from tests.support.vllm_cpu import kill_group, start_in_own_group
from tests.support.workload import THREADS

MIB = 1 << 20
LAYERS, WIDTH = 12, {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
BLOCK = 16
ENGINE_TIMEOUT = 3600.0

OFF, FULL, ACTIVE, AUTO = "off", "full", "active", "auto"
BUDGETS = (64 * MIB, 256 * MIB, 1024 * MIB)
"""Bytes of KV cache of each of the two ranks."""

TTFT, TTFT_HITS = "TTFT, 0 % prefix hits", "TTFT, 90 % prefix hits"
PREFILL, PREFILL_HITS = "prefill, 0 % prefix hits", "prefill, 90 % prefix hits"
DECODE = "decode"
UNITS = {TTFT: "s", TTFT_HITS: "s", PREFILL: "tokens/s", PREFILL_HITS: "tokens/s", DECODE: "tokens/s"}
"""What is measured of an engine in each round; prefill counts the tokens of the prompts, found or computed."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine: its payload, or `OFF`, and the KV budget of a rank in bytes."""

    payload: str
    budget: int

    @property
    def name(self) -> str:
        """As in the rows."""
        return f"{self.payload} at {self.budget // MIB} MiB"

    def arguments(self) -> dict[str, Any]:
        """What `vllm.LLM` is given beside the rest."""
        arguments: dict[str, Any] = {"kv_cache_memory_bytes": self.budget}
        if self.payload != OFF:
            settings = {"payload": self.payload}
            arguments["additional_config"] = {"enable_kvpp": True, "kvpp": settings}
        return arguments


OFF_LARGE = Engine(payload=OFF, budget=BUDGETS[-1])
AUTO_LARGE = Engine(payload=AUTO, budget=BUDGETS[-1])
AUTO_SMALL = Engine(payload=AUTO, budget=BUDGETS[0])

BARS = {
    (AUTO_LARGE, OFF_LARGE): {
        TTFT: Bar(limit=1.05, sense="<="),
        TTFT_HITS: Bar(limit=1.05, sense="<="),
        DECODE: Bar(limit=0.85, sense=">="),
    },
    (AUTO_LARGE, AUTO_SMALL): {
        TTFT: Bar(limit=1.1, sense="<="),
        TTFT_HITS: Bar(limit=1.1, sense="<="),
        DECODE: Bar(limit=0.9, sense=">="),
    },
}
"""The second: what KVPP costs must follow the batch, not the cache."""

Figures = dict[str, dict[str, list[float]]]
"""Of each engine by its name: a list per figure, with an item a round."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sizes in tokens: of a prompt, of the chunks that it is computed in, and of what is decoded after each prompt."""

    prompt: int
    chunk: int
    decoded_prompt: int
    decoded: int
    requests: int = 4

    @property
    def prefix(self) -> int:
        """Tokens of a prompt that are found in the prefix cache, at 90 %: whole blocks."""
        return round(0.9 * self.prompt) // BLOCK * BLOCK


BATCH = Batch(prompt=1024, chunk=256, decoded_prompt=128, decoded=32)
QUICK_BATCH = Batch(prompt=512, chunk=128, decoded_prompt=128, decoded=16)


def rows(quick: bool) -> list[Row]:
    """Every payload against KVPP off, budget by budget, and auto at the largest budget against the smallest.

    The quick run has the pairs with bars only.
    """
    with tempfile.TemporaryDirectory(prefix="kvpp-bench-") as scratch:
        place = Path(scratch)
        config = model_config(layers=LAYERS, vocab_size=build_tokenizer().get_vocab_size()) | WIDTH
        model = write_model(place / "model", config, dict(model_weights(config, seed=0)))
        plugin(place / "plugin")
        if quick:
            figures = _measure(place, model, QUICK_BATCH, 3, [OFF_LARGE, AUTO_LARGE, AUTO_SMALL])
            return _held_rows(AUTO_LARGE, OFF_LARGE, figures) + _held_rows(
                AUTO_LARGE, AUTO_SMALL, figures
            )
        measure = partial(_measure, place, model, BATCH, 5)
        found = []
        for budget in BUDGETS:
            off, *others = [
                Engine(payload=payload, budget=budget) for payload in (OFF, FULL, ACTIVE, AUTO)
            ]
            figures = measure([off, *others])
            for engine in others:
                found += _held_rows(engine, off, figures)
        return found + _held_rows(AUTO_LARGE, AUTO_SMALL, measure([AUTO_SMALL, AUTO_LARGE]))


def _held_rows(engine: Engine, base: Engine, figures: Figures) -> list[Row]:
    """A row of each figure of `engine` against that of `base`, with the bar that this pair has, if any."""
    bars = BARS.get((engine, base), {})
    return [
        make_row(
            f"vLLM {what}: {engine.name} against {base.name}",
            unit,
            figures[engine.name][what],
            figures[base.name][what],
            bar=bars.get(what),
        )
        for what, unit in UNITS.items()
    ]


def _measure(place: Path, model: Path, batch: Batch, rounds: int, engines: Sequence[Engine]) -> Figures:
    """The figures of each engine, as `vllm_engines` takes them in a process of its own."""
    spec, result, log_path = (place / name for name in ("spec.json", "result.json", "log.txt"))
    described = {engine.name: engine.arguments() for engine in engines}
    spec.write_text(
        json.dumps(
            {
                "model": str(model),
                "engines": described,
                "batch": asdict(batch) | {"prefix": batch.prefix},
                "rounds": rounds,
            }
        )
    )
    command = [sys.executable, "-m", "tests.benchmarks.vllm_engines", str(spec), str(result)]
    with log_path.open("wb") as log:
        extra = THREADS | {"PYTHONPATH": str(place / "plugin")}
        process = start_in_own_group(command, 2, extra, log)
        try:
            process.wait(ENGINE_TIMEOUT)
        finally:
            kill_group(process)
    if process.returncode != 0:
        text = log_path.read_text(errors="replace")
        raise RuntimeError(
            f"The engines' process exited with {process.returncode}; its log ends:\n{text[-6000:]}"
        )
    figures: Figures = json.loads(result.read_text())
    return figures

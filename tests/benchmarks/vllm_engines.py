"""The child process of `bench_vllm`: `python -m tests.benchmarks.vllm_engines SPEC.json RESULT.json`."""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvpp_vllm.demo.engine import engine_arguments
from tests.support.vllm_cpu import restore_scheduling
from tests.support.workload_run import import_once_for_all_workers

QUIET = 1.2
"""Seconds after which the workers of an idle engine wait without using a core; vLLM's readers spin for one."""

VOCABULARY = range(2, 300)


def main(spec_path: Path, result_path: Path) -> None:
    """Start all engines, let them take turns, and write the figures of each: lists with an item a round."""
    from vllm import LLM

    spec = json.loads(spec_path.read_text())
    import_once_for_all_workers()
    restore_scheduling(["chunked_prefill", "prefix_caching"])
    batch, tokens = spec["batch"], random.Random(0)
    shared = engine_arguments(Path(spec["model"]), ranks=2) | {
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": batch["chunk"],
        "max_model_len": batch["prompt"] + batch["chunk"],
    }
    drivers = {name: Driver(LLM(**(shared | own)), batch) for name, own in spec["engines"].items()}
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in drivers}
    for number in range(-1, spec["rounds"]):  # the first warms up
        prompts = Prompts(batch, tokens)
        for name, driver in drivers.items():
            time.sleep(QUIET)
            for what, figure in driver.round(prompts).items():
                if number >= 0:
                    figures[name].setdefault(what, []).append(figure)
    result_path.write_text(json.dumps(figures))
    for driver in drivers.values():
        driver.engine.engine_core.shutdown()


class Prompts:
    """The prompts of one round: new ones, and others that share nine tenths with them."""

    def __init__(self, batch: dict[str, int], tokens: random.Random) -> None:
        def draw(count: int) -> list[int]:
            return [tokens.choice(VOCABULARY) for _ in range(count)]

        prefix = batch["prefix"]
        rest = batch["prompt"] - prefix
        self.alone, *self.pair = (draw(batch["prompt"]) for _ in range(3))
        self.alone_again, *self.pair_again = (p[:prefix] + draw(rest) for p in (self.alone, *self.pair))
        self.decoded = [draw(batch["decoded_prompt"]) for _ in range(batch["requests"])]


class Driver:
    """Steps one engine and takes the time."""

    def __init__(self, llm: Any, batch: dict[str, int]) -> None:
        self.engine = llm.llm_engine
        self.batch = batch
        self.count = 0

    def round(self, prompts: Prompts) -> dict[str, float]:
        """The figures of one round, by the names of `bench_vllm.UNITS`."""
        alone = self._first_tokens([prompts.alone], found=0)
        alone_again = self._first_tokens([prompts.alone_again], found=self.batch["prefix"])
        pair = self._first_tokens(prompts.pair, found=0)
        pair_again = self._first_tokens(prompts.pair_again, found=self.batch["prefix"])
        tokens = sum(map(len, prompts.pair))
        return {
            "TTFT, 0 % prefix hits": alone,
            "TTFT, 90 % prefix hits": alone_again,
            "prefill, 0 % prefix hits": tokens / pair,
            "prefill, 90 % prefix hits": tokens / pair_again,
            "decode": self._decode(prompts.decoded),
        }

    def _first_tokens(self, prompts: Sequence[Sequence[int]], *, found: int) -> float:
        """Seconds until every prompt has its first token; `found` tokens of each come from the prefix cache."""
        began = time.perf_counter()
        self._add(prompts, max_tokens=1)
        outputs = self._step_while(lambda _: True)
        seconds = time.perf_counter() - began
        cached = [output.num_cached_tokens for output in outputs.values()]
        if cached != [found] * len(prompts):
            raise RuntimeError(
                f"The prefix cache had {cached} tokens of the prompts; expected {found} of each."
            )
        return seconds

    def _decode(self, prompts: Sequence[Sequence[int]]) -> float:
        """Tokens per second of all requests together, once each has its first token."""
        self._add(prompts, max_tokens=1 + self.batch["decoded"])
        started = self._step_while(lambda outputs: len(outputs) < len(prompts))
        before = sum(len(output.outputs[0].token_ids) for output in started.values())
        began = time.perf_counter()
        outputs = self._step_while(lambda _: True)
        seconds = time.perf_counter() - began
        return (sum(len(output.outputs[0].token_ids) for output in outputs.values()) - before) / seconds

    def _add(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for prompt in prompts:
            self.count += 1
            self.engine.add_request(str(self.count), {"prompt_token_ids": list(prompt)}, sampling)

    def _step_while(self, going: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Step until nothing is left to do or not `going`; the last output of every request that had one."""
        outputs: dict[str, Any] = {}
        while self.engine.has_unfinished_requests() and going(outputs):
            outputs |= {output.request_id: output for output in self.engine.step()}
        return outputs


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The child process of `run_engine`: `python -m tests.support.engine_run SPEC.json RESULT.json`.

The environment is already set by the parent. The engine core lives in this process, its workers are children.
"""

import json
import sys
import traceback
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvpp_vllm.demo.engine import engine_arguments
from tests.support.vllm_cpu import EngineSpec, restore_scheduling, with_known_payload


def main(spec_path: Path, result_path: Path) -> None:
    """Run the spec and write the fields of `EngineResult`, whatever happens."""
    spec = EngineSpec(**json.loads(spec_path.read_text()))
    result: dict[str, Any] = {}
    try:
        run(spec, result)
    except BaseException as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    result_path.write_text(json.dumps(result, default=repr))


def run(spec: EngineSpec, result: dict[str, Any]) -> None:
    """Fill `result` step by step, so that an error leaves what came before it."""
    from vllm import LLM

    restore_scheduling(spec.restore)
    arguments = (
        engine_arguments(Path(spec.model), ranks=spec.ranks)
        | {"disable_log_stats": False}
        | with_known_payload(spec.engine)
    )
    llm = LLM(**arguments)
    result["num_blocks"] = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    result |= {"tokens": [], "logprobs": [], "cached_tokens": []}
    for prompts, methods in zip_longest(spec.rounds, spec.before, fillvalue=()):
        for method in methods:
            llm.collective_rpc(method)
        _run_round(llm, spec, prompts, result)
        result["preemptions"] = _counter(llm, "vllm:num_preemptions")
    result["rpc"] = {method: llm.collective_rpc(method) for method in spec.rpc}


def _run_round(llm: Any, spec: EngineSpec, prompts: Any, result: dict[str, Any]) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=spec.max_tokens, ignore_eos=True, logprobs=0 if spec.logprobs else None
    )
    requests = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False
    )
    outputs = [request.outputs[0] for request in requests]
    result["tokens"].append([list(output.token_ids) for output in outputs])
    result["cached_tokens"].append([request.num_cached_tokens for request in requests])
    if spec.logprobs:
        result["logprobs"].append([_chosen_logprobs(output) for output in outputs])


def _chosen_logprobs(output: Any) -> list[float]:
    return [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]


def _counter(llm: Any, name: str) -> int:
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == name))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

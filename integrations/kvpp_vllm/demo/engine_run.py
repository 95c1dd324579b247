"""The child process of the demo: one engine over the demo's prompts.

`python -m kvpp_vllm.demo.engine_run SPEC RESULT PROGRESS` reads a run as JSON, writes its result as JSON
and appends a line to PROGRESS whenever a phase begins. The environment is set by the parent.
"""

import json
import sys
from pathlib import Path
from typing import Any

from kvpp_vllm.demo.engine import engine_arguments


def main(spec_path: Path, result_path: Path, progress_path: Path) -> None:
    """Run the engine once and write what it gave."""
    spec = json.loads(spec_path.read_text(encoding="utf-8"))

    def report(phase: str) -> None:
        with progress_path.open("a", encoding="utf-8") as progress:
            progress.write(phase + "\n")

    report("importing vLLM")
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - takes seconds, which the parent shows

    report("starting the engine")
    arguments = engine_arguments(
        Path(spec["model"]), ranks=spec["ranks"], device_type=spec["device_type"]
    )
    llm = LLM(**arguments, additional_config=spec["additional_config"])
    report("generating")
    sampling = SamplingParams(temperature=0, max_tokens=spec["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in spec["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    report("reading figures")
    kvpp = spec["additional_config"].get("enable_kvpp", False)
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "engine_kv_bytes": _planned_bytes(llm),
        "stats": llm.collective_rpc("kvpp_stats") if kvpp else [],
        "traces": llm.collective_rpc("kvpp_write_trace") if kvpp else [],
    }
    result_path.write_text(json.dumps(result), encoding="utf-8")


def _planned_bytes(llm: Any) -> int:
    """Bytes of the KV cache as vLLM's planner counts them for one rank, all layers included."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return int(config.kv_cache_tensors[0].size)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""The child process of `run_engines`: `python -m tests.npu.engine_run ENGINES.json OUTCOMES.json`."""

import importlib
import json
import multiprocessing
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.npu import faults
from tests.support.workload import SEPARATOR
from tests.support.workload_run import Drive

USUAL = {
    "tensor_parallel_size": 2,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 768,
    "max_num_seqs": 8,
}


def main(engines_path: Path, outcomes_path: Path) -> None:
    # Engines and their workers are forked: what is imported here they have, and it is most of an engine's start.
    importlib.import_module("vllm_ascend.worker.worker")
    context = multiprocessing.get_context("fork")
    outcomes = []
    for number, engine in enumerate(json.loads(engines_path.read_text())):
        print(SEPARATOR, end="", flush=True)
        outcome = outcomes_path.with_name(f"outcome{number}.json")
        child = context.Process(target=run_and_write, args=(engine, outcome))
        child.start()
        child.join()
        ended = {"error": f"the engine's process ended with {child.exitcode}"}
        outcomes.append(json.loads(outcome.read_text()) if outcome.exists() else ended)
    outcomes_path.write_text(json.dumps(outcomes))


def run_and_write(engine: dict[str, Any], outcome: Path) -> None:
    """Run one engine in this process, and write its `Outcome` or the error that it ended with."""
    try:
        with faults.present(engine["faults"]):
            found = run(engine)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    outcome.write_text(json.dumps(found, default=repr))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what vLLM leaves behind is not waited for


def run(engine: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    additional = engine["additional"]
    if engine["kvpp"] is not None:
        additional = additional | switched_on(engine["kvpp"])
    llm = LLM(
        model=engine["model"],
        disable_log_stats=False,
        additional_config=additional,
        **(USUAL | engine["arguments"]),
    )
    try:
        drive = LoggedDrive(llm)
        for requests in engine["rounds"]:
            drive.round(requests)
        found = drive.outcome()
        found["blocks"] = found.pop("num_blocks")
        del found["slept"]
        found["operators"] = llm.collective_rpc(operator_calls)[0]
        return found | {
            "logprobs": drive.logprobs,
            "rpc": {name: llm.collective_rpc(name) for name in engine["rpc"]},
        }
    finally:
        llm.llm_engine.engine_core.shutdown()


def switched_on(settings: dict[str, Any]) -> dict[str, Any]:
    """KVPP in additional_config, with `settings`; a version with a KVPP of its own takes none of them.

    There, settings stand in the environment, put there for this one engine, and nothing in additional_config.
    """
    from kvpp_vllm.ascend.own import SETTINGS, own_kvpp

    os.environ.pop(SETTINGS, None)
    if not own_kvpp():
        return {"enable_kvpp": True, "kvpp": settings}
    if settings == {"own": True}:
        return {"enable_kvpp": True}
    os.environ[SETTINGS] = json.dumps(settings)
    return {}


def operator_calls(worker: Any) -> Counter[str]:
    """How often each operator of the stand-in has run in this worker."""
    from torch_npu._registry import CALLS

    return CALLS


class LoggedDrive(Drive):
    """Keeps the logprob of every token as well."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.logprobs: list[list[float]] = []

    def round(self, requests: list[dict[str, Any]]) -> None:
        self.logprobs += [[] for _ in requests]
        super().round(requests)

    def _sampling(self, request: dict[str, Any]) -> Any:
        sampling = super()._sampling(request)
        sampling.logprobs = 1
        return sampling

    def _take(self, output: Any) -> None:
        super()._take(output)
        completion = output.outputs[0]
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        self.logprobs[int(output.request_id)] = [found[token].logprob for token, found in chosen]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""The child process of `run_workloads`: `python -m tests.support.workload_run WORKLOADS.json OUTCOMES.json`."""

import json
import multiprocessing
import os
import pkgutil
import sys
import traceback
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvpp_vllm.demo.engine import engine_arguments
from tests.support.gpu_platform import LIBRARY
from tests.support.vllm_cpu import restore_scheduling, with_known_payload
from tests.support.workload import SEPARATOR, Covered

COVERED = [field.name for field in fields(Covered)]


def main(workloads_path: Path, outcomes_path: Path) -> None:
    workloads = json.loads(workloads_path.read_text())
    import_once_for_all_workers()
    restore_scheduling(workloads[0]["restore"])
    outcomes = [run(workload) for workload in workloads]
    outcomes_path.write_text(json.dumps(outcomes, default=repr))


def run(workload: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    print(SEPARATOR, end="", flush=True)
    arguments = engine_arguments(Path(workload["model"]), ranks=workload["workers"])
    engine = arguments | {"disable_log_stats": False} | with_known_payload(workload["engine"])
    if workload["refused"]:
        return refused(engine)
    llm = LLM(**engine)
    try:
        if workload["before"]:
            llm.collective_rpc(pkgutil.resolve_name(workload["before"]))
        drive = Drive(llm)
        for number, requests in enumerate(workload["rounds"]):
            if number and workload["sleep_between"]:
                drive.sleep_and_wake()
            for faults in workload["faults"][number : number + 1]:
                llm.collective_rpc("set_faults", args=(faults,))
            drive.round(requests)
        return drive.outcome() | {"rpc": {name: llm.collective_rpc(name) for name in workload["rpc"]}}
    finally:
        llm.llm_engine.engine_core.shutdown()


def refused(engine: dict[str, Any]) -> dict[str, Any]:
    """The outcome of an engine that does not start; what it says is in the log."""
    from vllm import LLM

    try:
        LLM(**engine)
    except Exception:
        traceback.print_exc()
        nothing: dict[str, Any] = {"tokens": [], "num_blocks": 0, "async_scheduling": False}
        nothing |= {"drafts": [], "accepted": 0, "slept": 0, "rpc": {}}
        return nothing | {"covered": dict.fromkeys(COVERED, 0)}
    raise AssertionError("The engine started.")


def import_once_for_all_workers() -> None:
    """Fork workers from a server that has imported vLLM, where vLLM would start each as a new interpreter.

    Imports are most of an engine's start. Thread binding, which vLLM does through the environment of a new
    interpreter, is lost; every worker has one thread instead (OMP_NUM_THREADS, set by the parent).
    """
    from vllm.v1.executor import multiproc_executor

    # The CPU's worker replaces names of torch, which would reach workers of other platforms.
    worker = "gpu_worker" if LIBRARY in os.environ else "cpu_worker"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.executor.multiproc_executor", f"vllm.v1.worker.{worker}"])
    multiproc_executor.get_mp_context = lambda: context


class Drive:
    """Steps an in-process engine and keeps count of what its scheduler does."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.metrics = llm.get_metrics
        self.counts: Counter[str] = Counter()
        self.tokens: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.slept = 0
        schedule = self.core.scheduler.schedule

        def schedule_and_count(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._count(output)
            return output

        self.core.scheduler.schedule = schedule_and_count

    def round(self, requests: list[dict[str, Any]]) -> None:
        """Run `requests` to their ends."""
        first = len(self.tokens)
        self.tokens += [[] for _ in requests]
        waiting = sorted(range(len(requests)), key=lambda n: requests[n]["arrival"])
        aborts: dict[str, int] = {}
        step = 0
        while waiting or self.engine.has_unfinished_requests():
            while waiting and requests[waiting[0]]["arrival"] <= step:
                number = waiting.pop(0)
                name = str(first + number)
                self._add(name, requests[number])
                if requests[number]["abort_after"] is not None:
                    aborts[name] = requests[number]["abort_after"]
            for output in self.engine.step():
                self._take(output)
                if output.finished:
                    aborts.pop(output.request_id, None)
            self._abort([name for name, after in aborts.items() if len(self.tokens[int(name)]) >= after])
            aborts = {
                name: after for name, after in aborts.items() if len(self.tokens[int(name)]) < after
            }
            step += 1

    def sleep_and_wake(self) -> None:
        self.engine.sleep(level=1)
        self.slept += self.engine.is_sleeping()
        self.engine.wake_up()

    def outcome(self) -> dict[str, Any]:
        config = self.engine.vllm_config
        counts = {name: self.counts[name] for name in COUNTED} | {
            "requests": len(self.tokens),
            "preemptions": self._metric("vllm:num_preemptions"),
        }
        return {
            "tokens": self.tokens,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "covered": counts,
            "drafts": self.drafts,
            "accepted": self._metric("vllm:spec_decode_num_accepted_tokens"),
            "slept": self.slept,
        }

    def _take(self, output: Any) -> None:
        self.tokens[int(output.request_id)] = list(output.outputs[0].token_ids)

    def _add(self, name: str, request: dict[str, Any]) -> None:
        prompt = {"prompt_token_ids": list(request["prompt"])}
        self.engine.add_request(name, prompt, self._sampling(request))

    def _sampling(self, request: dict[str, Any]) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)

    def _abort(self, names: list[str]) -> None:
        launched = {_external(id_) for batch in self._queue() for id_ in batch[1].num_scheduled_tokens}
        self.counts["aborted"] += len(names)
        self.counts["aborted_in_flight"] += len(launched.intersection(names))
        self.engine.abort_request(names)

    def _count(self, output: Any) -> None:
        """Count what one scheduler step holds, before its batch is launched."""
        counts, cached = self.counts, output.scheduled_cached_reqs
        if not output.total_num_scheduled_tokens:
            return
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        counts["prefix_hits"] += sum(count > 0 for count in computed.values())
        counts["resumed"] += len(cached.resumed_req_ids)
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        chunks = decodes = 0
        for name, scheduled in output.num_scheduled_tokens.items():
            prompt = self.core.scheduler.requests[name].num_prompt_tokens
            chunks += computed[name] + scheduled < prompt
            decodes += computed[name] >= prompt
        counts["chunks"] += chunks
        counts["mixed"] += bool(chunks and decodes)
        counts["used_blocks"] += len(self._used(computed))
        counts["forwards"] += 1
        counts["with_history"] += any(computed.values())
        counts["in_flight"] = max(counts["in_flight"], len(self._queue()) + 1)
        self.drafts += [list(tokens) for tokens in output.scheduled_spec_decode_tokens.values()]

    def _used(self, computed: dict[str, int]) -> set[int]:
        """The distinct blocks that hold the first `computed` tokens of each request."""
        size = self.engine.vllm_config.cache_config.block_size
        tables = self.core.scheduler.kv_cache_manager
        return {
            block
            for name, tokens in computed.items()
            for block in tables.get_block_ids(name)[0][: -(-tokens // size)]
        }

    def _queue(self) -> Any:
        return self.core.batch_queue or ()

    def _metric(self, name: str) -> int:
        return int(sum(metric.value for metric in self.metrics() if metric.name == name))


COUNTED = (
    "forwards",
    "with_history",
    "mixed",
    "chunks",
    "prefix_hits",
    "resumed",
    "in_flight",
    "aborted",
    "aborted_in_flight",
    "used_blocks",
)


def _external(request_id: str) -> str:
    """The id a request was added with; vLLM appends random characters to it."""
    return request_id.rsplit("-", 1)[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

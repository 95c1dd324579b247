"""Child process of the refusal tests: what vLLM says of configurations that ask for KVPP.

`python -m tests.vllm.refusals MLA_MODEL DENSE_MODEL` prints a JSON object, case -> what was raised or chosen.
"""

import json
import sys
from typing import Any

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def outcome(
    model: str, *, ranks: int = 2, eager: bool = True, additional: Any = None, **more: Any
) -> str:
    from vllm.engine.arg_utils import EngineArgs

    try:
        config = EngineArgs(
            model=model,
            tensor_parallel_size=ranks,
            enforce_eager=eager,
            dtype="float32",
            block_size=16,
            kv_cache_memory_bytes=16 << 20,
            max_model_len=512,
            additional_config=additional if additional is not None else {"enable_kvpp": True},
            **more,
        ).create_engine_config()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return config.parallel_config.worker_cls


def main(mla: str, dense: str) -> None:
    from kvpp_vllm import checks

    on = {"enable_kvpp": True}
    cases = {
        "on": outcome(mla),
        "off": outcome(mla, additional={}),
        "false": outcome(mla, additional={"enable_kvpp": False}),
        "tp1": outcome(mla, ranks=1),
        "not eager": outcome(mla, eager=False),
        "not mla": outcome(dense),
        "unknown key": outcome(mla, additional=on | {"kvpp": {"trace_dri": "/tmp/x"}}),
        "not a boolean": outcome(mla, additional={"enable_kvpp": "yes"}),
        "not an object": outcome(mla, additional=on | {"kvpp": 3}),
        "relative trace_dir": outcome(mla, additional=on | {"kvpp": {"trace_dir": "here"}}),
        "bad timeout": outcome(mla, additional=on | {"kvpp": {"timeout_s": -1}}),
        "connector": outcome(
            mla, kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        ),
    }
    checks.WORKERS.pop(CPU_WORKER)
    cases["other worker"] = outcome(mla)
    print("CASES " + json.dumps(cases))


if __name__ == "__main__":
    main(*sys.argv[1:])

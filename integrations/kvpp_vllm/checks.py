"""What KVPP refuses, decided on the finished vLLM configuration, one sentence each."""

from collections.abc import Iterator
from typing import Any

WORKERS = {"vllm.v1.worker.cpu_worker.CPUWorker": "kvpp_vllm.worker.KvppCPUWorker"}
"""vLLM's worker classes that KVPP extends, and with what."""


def refusals(vllm_config: Any) -> Iterator[str]:
    """Why this configuration cannot run with KVPP; nothing if it can."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not model.use_mla:
        yield (
            f"model {model.model!r} does not use MLA, so tensor parallelism already splits its KV cache "
            "and there is nothing to win; remove enable_kvpp from --additional-config"
        )
    if not model.enforce_eager:
        yield "graph execution would skip the per-layer hook; add --enforce-eager"
    if vllm_config.use_v2_model_runner:
        yield "Model Runner V2 is not supported yet; set VLLM_USE_V2_MODEL_RUNNER=0"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        yield (
            "decode context parallelism splits the KV cache another way; "
            "drop --decode-context-parallel-size"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        yield "prefill context parallelism is not supported; drop --prefill-context-parallel-size"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors and disaggregated prefill are not supported; drop --kv-transfer-config"
    if parallel.worker_cls not in WORKERS and parallel.worker_cls not in WORKERS.values():
        known = ", ".join(WORKERS)
        yield (
            f"the worker class is {parallel.worker_cls}, and this version extends {known}; run on a "
            "platform whose worker is among them and leave --worker-cls alone"
        )

"""Settings with which stock vLLM runs the demo checkpoint, the same tokens on every run.

Nothing here changes vLLM. The values are for vLLM 0.32 on Linux. Those for accelerators have not been run yet.
"""

import os
from pathlib import Path
from typing import Any

from kvpp_vllm.demo.platform import CPU

BLOCK_TOKENS = 16
"""Tokens in a KV block: the only size that vLLM's MLA decode kernel for CPUs has."""

KV_CACHE_BYTES = 16 << 20
"""KV cache of one rank, bytes. 12 layers of float32 need 442,368 bytes a block of 16 tokens, so 37 blocks fit, 592
tokens; of bfloat16, in which accelerators serve, twice as many tokens."""

MAX_MODEL_TOKENS = 512


def environment(*, ranks: int, device_type: str = CPU) -> dict[str, str]:
    """Return the environment variables for `ranks` workers on such devices; set them before importing vLLM.

    They serve `vllm.LLM` and `vllm serve` alike. `vllm serve` ignores the first.
    """
    common = {
        # With the engine in a process of its own, which requests share a batch depends on timing.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The checkpoint and its tokenizer are local files.
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device_type == "cuda":
        # KVPP refuses this all-reduce; without KVPP the same one is used, so that only KVPP differs.
        return common | {"VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    if device_type != CPU:
        return common
    return common | {
        "VLLM_CPU_OMP_THREADS_BIND": _thread_binding(ranks),
        # Under enforce_eager only a helper for logprobs is compiled, which takes seconds and saves none.
        "TORCH_COMPILE_DISABLE": "1",
    }


def engine_arguments(model: Path, *, ranks: int, device_type: str = CPU) -> dict[str, Any]:
    """Return keyword arguments of `vllm.LLM` for tensor parallelism over `ranks` workers on such devices.

    An accelerator's MLA kernels take no float32, and choose the size of a block themselves.
    """
    on_cpu = {"dtype": "float32", "block_size": BLOCK_TOKENS}
    return (on_cpu if device_type == CPU else {"dtype": "bfloat16"}) | {
        "model": str(model),
        "tensor_parallel_size": ranks,
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "max_model_len": MAX_MODEL_TOKENS,
        "max_num_seqs": 8,
    }


def _thread_binding(ranks: int) -> str:
    """Deal the CPUs this process may use to the ranks, for VLLM_CPU_OMP_THREADS_BIND.

    vLLM's own choice needs one NUMA node a rank. With fewer CPUs than ranks, ranks share.
    """
    cpus = sorted(os.sched_getaffinity(0))
    shares = [cpus[rank::ranks] or [cpus[rank % len(cpus)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)

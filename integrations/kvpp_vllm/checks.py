"""What KVPP refuses, decided on the finished vLLM configuration: one sentence each, naming the setting.

What only a worker can know is refused by the plan, before memory is allocated: layers that use another
layer's cache, several cache groups, caches that are not replicated.
"""

from collections.abc import Iterator
from typing import Any

from kvpp_vllm.collectives import collective_refusals

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "kvpp_vllm.worker_cpu.KvppCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "kvpp_vllm.worker.KvppWorker",
    "vllm_ascend.worker.worker.NPUWorker": "kvpp_vllm.ascend.worker.KvppNPUWorker",
}
"""vLLM's and vllm-ascend's worker classes that KVPP extends, and with what."""

HOOK_OPS = ("vllm::unified_mla_kv_cache_update", "vllm::unified_mla_attention_with_output")
"""vLLM's custom operators that run a layer's hooks: compiled pieces and CUDA graphs have to end at them."""

INDEXER_OP = "vllm::sparse_attn_indexer"
"""One more with sparse attention: it comes first, and writes and reads the indexer's cache."""


def end_pieces_at_hooks(vllm_config: Any) -> None:
    """Let compiled pieces end at the indexer's operator too, as vLLM's own choice does.

    A list of the user's that names the two operators of MLA is completed.
    """
    compilation = vllm_config.compilation_config
    if not (_sparse(vllm_config.model_config) and _splits(compilation)):
        return
    ends = compilation.splitting_ops
    if INDEXER_OP not in ends and all(op in ends for op in HOOK_OPS):
        compilation.splitting_ops = [*ends, INDEXER_OP]


def refusals(vllm_config: Any) -> Iterator[str]:
    """Why this configuration cannot run with KVPP; nothing if it can."""
    yield from general_refusals(vllm_config)
    yield from _graphs(vllm_config.model_config, vllm_config.compilation_config)


def general_refusals(vllm_config: Any) -> Iterator[str]:
    """The refusals that do not depend on the platform."""
    yield from _model(vllm_config.model_config)
    yield from _parallelism(vllm_config.parallel_config)
    yield from _cache_users(vllm_config)
    yield from _drafts(vllm_config.speculative_config)
    yield from collective_refusals(vllm_config)
    yield from _worker(vllm_config.parallel_config)


def _model(model: Any) -> Iterator[str]:
    if not model.use_mla:
        yield (
            f"model {model.model!r} does not use MLA, so tensor parallelism already splits its KV cache "
            "and there is nothing to win; remove enable_kvpp from --additional-config"
        )
    if model.is_hybrid:
        yield (
            f"model {model.model!r} is hybrid, and KVPP needs a KV cache of one kind in all layers; "
            "remove enable_kvpp from --additional-config"
        )
    if model.get_sliding_window() is not None:
        yield (
            f"model {model.model!r} has sliding-window layers, and KVPP sends whole caches; add "
            "--disable-sliding-window or remove enable_kvpp from --additional-config"
        )


def _graphs(model: Any, compilation: Any) -> Iterator[str]:
    """A replayed graph runs no Python, so every hook has to lie between the pieces that are captured."""
    from vllm import envs  # noqa: PLC0415 - vLLM is there only when a configuration is being made
    from vllm.config import CompilationMode  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    mode = compilation.cudagraph_mode
    eager = compilation.mode == CompilationMode.NONE and not mode
    if eager:
        return
    if mode and _sparse(model) and (current_platform.is_cuda() or current_platform.is_rocm()):
        yield (
            f"model {model.model!r} has sparse attention, whose fused kernels on this platform write both "
            f"caches inside a captured piece (cudagraph_mode {mode.name}); add --enforce-eager"
        )
    if mode and mode.has_full_cudagraphs():
        yield (
            f"cudagraph_mode {mode.name} replays attention without the per-layer hook; set cudagraph_mode "
            "to PIECEWISE in --compilation-config, or add --enforce-eager"
        )
    if mode and envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
        yield (
            "breakable CUDA graphs replay the KV cache update without the per-layer hook; set "
            "VLLM_USE_BREAKABLE_CUDAGRAPH=0, or add --enforce-eager"
        )
    if compilation.use_inductor_graph_partition:
        yield (
            "Inductor's graph partition captures the KV cache update together with the per-layer hook; "
            "set use_inductor_graph_partition to false in --compilation-config, or add --enforce-eager"
        )
    splits = _splits(compilation)
    if missing := [op for op in HOOK_OPS if splits and op not in compilation.splitting_ops]:
        yield (
            f"splitting_ops lacks {missing[0]}, so the per-layer hook would lie inside a compiled piece; "
            "leave splitting_ops and fuse_attn_quant out of --compilation-config, or add --enforce-eager"
        )


def _sparse(model: Any) -> bool:
    return getattr(model.hf_text_config, "index_topk", None) is not None


def _splits(compilation: Any) -> bool:
    """Whether vLLM splits, and captures pieces; in its other modes the operators are called one by one."""
    from vllm.config import CompilationMode  # noqa: PLC0415

    return bool(compilation.mode == CompilationMode.VLLM_COMPILE)


def _parallelism(parallel: Any) -> Iterator[str]:
    if parallel.decode_context_parallel_size > 1:
        yield (
            "decode context parallelism splits the KV cache another way; "
            "drop --decode-context-parallel-size"
        )
    if parallel.prefill_context_parallel_size > 1:
        yield "prefill context parallelism is not supported; drop --prefill-context-parallel-size"
    if parallel.use_ubatching:
        yield (
            "micro-batches would have two forwards in flight, and KVPP runs one at a time; drop "
            "--enable-dbo and --ubatch-size"
        )


def _cache_users(vllm_config: Any) -> Iterator[str]:
    """Whatever else reads or places the KV cache, and would meet scratch slots where it expects layers."""
    from vllm import envs  # noqa: PLC0415

    transfer = vllm_config.kv_transfer_config
    if transfer is not None:
        yield (
            f"KV connectors ({transfer.kv_connector}), disaggregated prefill and KV offloading would "
            "read caches that this rank does not own; drop --kv-transfer-config and --kv-offloading-size"
        )
    layout = envs.VLLM_KV_CACHE_LAYOUT
    if layout is not None and layout.startswith("B"):
        yield (
            f"VLLM_KV_CACHE_LAYOUT={layout} places the layers of a block side by side, and KVPP needs "
            "every layer's cache in one piece; unset VLLM_KV_CACHE_LAYOUT"
        )


def _drafts(speculative: Any) -> Iterator[str]:
    if speculative is None:
        return
    if speculative.method != "mtp":
        yield (
            f"speculative method {speculative.method!r} is not supported, only MTP with a fixed number "
            "of steps; set method to mtp in --speculative-config, or drop --speculative-config"
        )
    # vLLM 0.23, below vllm-ascend, has no such setting.
    if getattr(speculative, "num_speculative_tokens_per_batch_size", None) is not None:
        yield (
            "the number of speculative tokens may not change from step to step; drop "
            "num_speculative_tokens_per_batch_size from --speculative-config"
        )


def _worker(parallel: Any) -> Iterator[str]:
    if parallel.worker_cls not in WORKERS and parallel.worker_cls not in WORKERS.values():
        known = ", ".join(WORKERS)
        yield (
            f"the worker class is {parallel.worker_cls}, and this version extends {known}; run on a "
            "platform whose worker is among them and leave --worker-cls alone"
        )

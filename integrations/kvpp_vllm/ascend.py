"""vllm-ascend: the places that KVPP would use there, and whether it brings a KVPP of its own.

The places are checked against the sources of version 0.23.0.post1, which is made for vLLM 0.23; nothing here
has run on an NPU. No worker of vllm-ascend is extended yet, so its configurations are refused by `checks`.
"""

import importlib.util
from pathlib import Path

from kvpp_vllm.seams import Seam

ASCEND_VERSION = "0.23.0.post1"
"""Whose sources the seams below were checked against."""

_WORKER = "vllm_ascend.worker.worker"
_RUNNER = "vllm_ascend.worker.model_runner_v1"
_RUNNER_V2 = "vllm_ascend.worker.v2.model_runner"
_ATTENTION_V2 = "vllm_ascend.worker.v2.attn_utils"
_MLA = "vllm_ascend.attention.mla_v1"
_SFA = "vllm_ascend.attention.sfa_v1"
_OPERATORS = "vllm_ascend.device.device_op"

ASCEND_SEAMS = (
    Seam(
        module=_WORKER,
        attribute="NPUWorker.init_device",
        parameters=(),
        use="own process group, once the device is set",
    ),
    Seam(
        module=_WORKER,
        attribute="NPUWorker.determine_available_memory",
        parameters=(),
        use="budget: physical bytes become the logical bytes that the planner divides",
    ),
    Seam(
        module=_WORKER,
        attribute="NPUWorker.initialize_from_config",
        parameters=("kv_cache_config",),
        use="allocation with the final block count",
    ),
    Seam(
        module=_WORKER,
        attribute="NPUWorker.execute_model",
        parameters=("scheduler_output",),
        use="end or abort of a forward",
    ),
    Seam(
        module=_RUNNER,
        attribute="NPUModelRunner._update_states",
        runner=1,
        parameters=("scheduler_output",),
        use="begin of a forward",
    ),
    Seam(
        module=_RUNNER,
        attribute="NPUModelRunner.get_kv_cache_spec",
        runner=1,
        parameters=(),
        use="cache specs of the stage's own layers: one a layer, indexer and scales included",
    ),
    Seam(
        module=_RUNNER,
        attribute="NPUModelRunner._allocate_kv_cache_tensors",
        runner=1,
        parameters=("kv_cache_config",),
        use="storage: a tuple of raw tensors per layer, one a component",
    ),
    Seam(
        module=_RUNNER,
        attribute="NPUModelRunner._reshape_kv_cache_tensors",
        runner=1,
        parameters=("kv_cache_config", "kv_cache_raw_tensors"),
        use="the engine's own views, over KVPP's storage",
    ),
    Seam(
        module=_RUNNER_V2,
        attribute="NPUModelRunner.initialize_kv_cache",
        runner=2,
        parameters=("kv_cache_config",),
        use="allocation with the final block count",
    ),
    Seam(
        module=_ATTENTION_V2,
        attribute="_allocate_kv_cache",
        runner=2,
        parameters=("kv_cache_config", "shared_layers", "device"),
        use="storage: a tuple of raw tensors per layer, one a component",
    ),
    Seam(
        module="vllm_ascend.core.kv_cache_interface",
        attribute="AscendMLAAttentionSpec",
        fields=(
            "sparse_head_dim",
            "cache_sparse_sfa_c8",
            "cache_sparse_li_c8",
            "page_size_bytes",
        ),
        use="components of a bundle: latent, rope, indexer and scales in one spec",
    ),
    Seam(
        module=_MLA,
        attribute="AscendMLAImpl.exec_kv_decode",
        parameters=("kv_no_split", "cos", "sin", "kv_cache", "slots"),
        use="acquire, native path: writes the decodes' new tokens, before the prefills'",
    ),
    Seam(
        module=_MLA,
        attribute="AscendMLAImpl.exec_kv_prefill",
        parameters=("kv_no_split", "cos", "sin", "kv_cache", "slots"),
        use="acquire, native path: first cache access of a batch without decodes",
    ),
    Seam(
        module=_MLA,
        attribute="AscendMLAImpl.forward",
        parameters=(
            "layer_name",
            "hidden_states",
            "kv_cache",
            "attn_metadata",
            "need_gather_q_kv",
            "output",
        ),
        use="release: its return is the last access to a layer's cache; entry for the fused path",
    ),
    Seam(
        module=_OPERATORS,
        attribute="BaseDeviceAdaptor.mla_preprocess_only_decode",
        parameters=("atten_obj", "hidden_states", "kv_cache", "attn_metadata"),
        use="acquire, fused path: projections and cache write in one operator",
    ),
    Seam(
        module=_SFA,
        attribute="AscendSFAImpl.exec_kv",
        parameters=("kv_no_split", "cos", "sin", "kv_cache", "slots", "attn_metadata"),
        use="acquire, native path: writes the main cache, before the indexer's",
    ),
    Seam(
        module=_SFA,
        attribute="AscendSFAImpl._sfa_preprocess_with_mlapo",
        parameters=(
            "hidden_states",
            "kv_cache",
            "cos",
            "sin",
            "slot_mapping",
            "num_input_tokens",
        ),
        use="acquire, fused path: projections and main cache write in one operator",
    ),
    Seam(
        module=_SFA,
        attribute="AscendSFAImpl._sfa_preprocess_with_prolog_v3",
        parameters=("hidden_states", "kv_cache", "cos", "sin", "slot_mapping", "cache_mode"),
        use="acquire, second fused path",
    ),
    Seam(
        module=_SFA,
        attribute="AscendSFAImpl._execute_sparse_flash_attention_process",
        parameters=(
            "ql_nope",
            "q_pe",
            "kv_cache",
            "topk_indices",
            "attn_metadata",
            "actual_seq_lengths_query",
            "actual_seq_lengths_key",
        ),
        use="release: its return is the last access to main and indexer caches",
    ),
)


def own_kvpp() -> bool:
    """Whether the installed vllm-ascend reads `enable_kvpp` itself, by the text of its settings' module."""
    if importlib.util.find_spec("vllm_ascend") is None:
        return False
    found = importlib.util.find_spec("vllm_ascend.ascend_config")
    return (
        found is not None
        and found.origin is not None
        and "enable_kvpp" in Path(found.origin).read_text(encoding="utf-8")
    )

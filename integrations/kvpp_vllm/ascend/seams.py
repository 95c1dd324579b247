"""Every place of vllm-ascend that KVPP leans on, in tables of its own: vLLM 0.23, below it, lacks some of vLLM 0.32's.

`ASCEND_SEAMS` are those of version 0.23.0.post1, which is made for vLLM 0.23. `OWN_SEAMS` are those of versions that
have a KVPP of their own and are served in its place, checked on 0.30.0rc2.
"""

from kvpp_vllm.config_seams import CONFIG_SEAMS
from kvpp_vllm.seams import COMMON_SEAMS, Seam, worker_seams

ASCEND_VERSION = "0.23.0.post1"
OWN_VERSION = "0.30.0rc2"
ASCEND_VERSIONS = f"vllm-ascend versions {ASCEND_VERSION}, {OWN_VERSION}"
"""On whose code the seams below were checked, imported with stand-in operators."""

_WORKER = "vllm_ascend.worker.worker"
_RUNNER = "vllm_ascend.worker.model_runner_v1"
_MLA = "vllm_ascend.attention.mla_v1"
_SFA = "vllm_ascend.attention.sfa_v1"
_OPERATORS = "vllm_ascend.device.device_op"

_FROM_VLLM = ("vllm.config", "vllm.v1.core.sched.output", "vllm.distributed.parallel_state")

_SHARED = (
    *(seam for seam in COMMON_SEAMS if seam.module in _FROM_VLLM),
    *worker_seams(_WORKER, "NPUWorker"),
    Seam(
        module=_RUNNER,
        attribute="NPUModelRunner._update_states",
        parameters=("scheduler_output",),
        use="begin of a forward",
    ),
    Seam(
        module=_RUNNER,
        attribute="NPUModelRunner.get_kv_cache_spec",
        parameters=(),
        use="cache specs of the stage's own layers: one a layer, indexer and scales included",
    ),
    Seam(
        module=_RUNNER,
        attribute="NPUModelRunner._allocate_kv_cache_tensors",
        parameters=("kv_cache_config",),
        use="storage: a tuple of raw tensors per layer, one a component",
    ),
)
"""vLLM's and vllm-ascend's places that both generations have."""

ASCEND_SEAMS = (
    *_SHARED,
    Seam(
        module=_RUNNER,
        attribute="NPUModelRunner._reshape_kv_cache_tensors",
        parameters=("kv_cache_config", "kv_cache_raw_tensors"),
        use="the engine's own views, over KVPP's storage",
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

OWN_SEAMS = (
    *_SHARED,
    Seam(
        module="vllm_ascend.core.kv_cache_interface",
        attribute="AscendMLAAttentionSpec",
        fields=("uses_packed_sfa_main_cache", "page_size_bytes"),
        use="components of a bundle: latent and rope, or both packed",
    ),
    Seam(
        module="vllm_ascend.core.kv_cache_interface",
        attribute="AscendSFAIndexerCacheSpec",
        fields=(
            "cache_sparse_li_c4",
            "scale_dim",
            "scale_dtype",
            "sfa_dcp_replicated_indexer_size",
            "page_size_bytes",
        ),
        use="components of a bundle: indexer and scales",
    ),
    Seam(
        module=_MLA,
        attribute="AscendMLAImpl.forward",
        parameters=("layer_name", "hidden_states", "kv_cache", "attn_metadata", "output"),
        use="release: its return is the last access to a layer's cache",
    ),
    Seam(
        module=_SFA,
        attribute="AscendSFAImpl.forward",
        parameters=("layer_name", "hidden_states", "kv_cache", "attn_metadata", "output"),
        use="release: its return is the last access to main and indexer caches",
    ),
)
"""Versions with a KVPP of their own offer `layerwise_kv_cache_hook` on each implementation: acquire, native and fused.

It is set when an implementation is made, so `hooks` looks for it there.
"""

ASCEND_CONFIG_SEAMS = (
    *(
        seam
        for seam in CONFIG_SEAMS
        if seam.module in ("vllm.config", "vllm.envs") and seam.attribute != "SpeculativeConfig"
    ),
    Seam(
        module="vllm.config",
        attribute="SpeculativeConfig",
        fields=("method",),
        use="refusing what KVPP cannot serve, before anything is loaded",
    ),
)
"""What `checks` reads from a configuration, as vLLM 0.23 has it."""

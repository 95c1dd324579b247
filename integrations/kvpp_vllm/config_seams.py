"""What `checks` reads from a vLLM configuration, as seams: a renamed setting must not pass for an unset one."""

from kvpp_vllm.seams import Seam

_USE = "refusing what KVPP cannot serve, before anything is loaded"
_BESIDE = "refusing collectives that NCCL does not order, beside KVPP's"
_MLA = "vllm.model_executor.layers.attention.mla_attention"

CONFIG_SEAMS = (
    Seam(
        module="vllm.config",
        attribute="VllmConfig",
        fields=(
            "additional_config",
            "compilation_config",
            "device_config",
            "kv_transfer_config",
            "model_config",
            "parallel_config",
            "speculative_config",
        ),
        use=_USE,
    ),
    Seam(
        module="vllm.config",
        attribute="ModelConfig",
        fields=("get_sliding_window", "hf_text_config", "is_hybrid", "model", "use_mla"),
        use=_USE,
    ),
    Seam(
        module="vllm.config",
        attribute="ParallelConfig",
        fields=(
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "tensor_parallel_size",
            "use_ubatching",
            "worker_cls",
        ),
        use=_USE,
    ),
    Seam(
        module="vllm.config",
        attribute="CompilationConfig",
        fields=("cudagraph_mode", "mode", "splitting_ops", "use_inductor_graph_partition"),
        use=_USE,
    ),
    Seam(
        module="vllm.config",
        attribute="CUDAGraphMode.has_full_cudagraphs",
        parameters=(),
        use=_USE,
    ),
    Seam(
        module="vllm.config",
        attribute="SpeculativeConfig",
        fields=("method", "num_speculative_tokens_per_batch_size"),
        use=_USE,
    ),
    Seam(module="vllm.config", attribute="DeviceConfig", fields=("device_type",), use=_USE),
    Seam(module="vllm.config", attribute="KVTransferConfig", fields=("kv_connector",), use=_USE),
    Seam(module="vllm.envs", attribute="VLLM_KV_CACHE_LAYOUT", use=_USE),
    Seam(module="vllm.envs", attribute="VLLM_USE_BREAKABLE_CUDAGRAPH", use=_USE),
    Seam(
        module=_MLA,
        attribute="unified_mla_kv_cache_update",
        parameters=("kv_c_normed", "k_pe", "layer_name", "kv_cache_dtype", "k_scale"),
        use="acquire in compiled models: an operator between the pieces",
    ),
    Seam(
        module=_MLA,
        attribute="unified_mla_attention_with_output",
        parameters=(
            "q",
            "kv_c_normed",
            "k_pe",
            "output",
            "layer_name",
            "output_scale",
            "output_block_scale",
            "kv_cache_dummy_dep",
            "quant_group_size",
            "quant_scale_ue8m0",
            "quant_col_major",
            "quant_tma_aligned",
            "q_dcp_replicated",
        ),
        use="release in compiled models: an operator between the pieces",
    ),
)

NCCL_SEAMS = (
    Seam(
        module="vllm.config",
        attribute="ParallelConfig",
        fields=("all2all_backend", "disable_custom_all_reduce", "use_all2all"),
        use=_BESIDE,
    ),
    Seam(module="vllm.config", attribute="CompilationConfig", fields=("pass_config",), use=_BESIDE),
    Seam(module="vllm.config", attribute="PassConfig", fields=("fuse_allreduce_rms",), use=_BESIDE),
    *(
        Seam(module="vllm.envs", attribute=name, use=_BESIDE)
        for name in (
            "VLLM_ALLREDUCE_USE_FLASHINFER",
            "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC",
            "VLLM_ALLREDUCE_USE_SYMM_MEM",
            "VLLM_NCCL_SO_PATH",
        )
    ),
)
"""What `collectives` reads besides, on devices whose collectives are NCCL's."""

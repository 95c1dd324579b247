"""vllm-ascend's worker with KVPP. Its module imports vllm-ascend, and with it torch_npu."""

from typing import Any

from vllm_ascend.worker.worker import NPUWorker

from kvpp_vllm.ascend.allocation import raw_tensors
from kvpp_vllm.ascend.hooks import hook_layers
from kvpp_vllm.ascend.own import own_kvpp, read_settings
from kvpp_vllm.ascend.seams import ASCEND_SEAMS, ASCEND_VERSIONS, OWN_SEAMS
from kvpp_vllm.ascend.specs import cache_specs
from kvpp_vllm.runners import V1, after_state_update
from kvpp_vllm.seams import check_seams
from kvpp_vllm.steps import KvppSteps


class KvppNPUWorker(KvppSteps, NPUWorker):  # type: ignore[misc]
    """A worker of an NPU whose KV cache is pipelined over its tensor-parallel group: not yet run on an NPU."""

    def init_device(self) -> None:
        """Set up the device as vllm-ascend does, then the KVPP group of this pipeline stage."""
        check_seams(OWN_SEAMS if own_kvpp() else ASCEND_SEAMS, versions=ASCEND_VERSIONS)
        super().init_device()
        self.join_group(read_settings(self.vllm_config.additional_config))

    def determine_available_memory(self) -> int:
        """The logical bytes that this worker's physical bytes are worth to the planner."""
        runner = self.model_runner
        available = super().determine_available_memory()
        specs = cache_specs(
            runner.get_kv_cache_spec(),
            self._layers(),
            drafts=V1.draft_layers(runner),
            shared=V1.shared_layers(runner),
        )
        override = self.cache_config.num_gpu_blocks_override
        return self.kvpp.budget(available, specs, override=override)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Initialise the KV cache on KVPP's storage, then start KVPP."""
        runner = self.model_runner
        allocate = runner._allocate_kv_cache_tensors

        def allocate_kv_cache_tensors(kv_cache_config: Any) -> Any:
            return raw_tensors(self.kvpp.store(kv_cache_config), runner, kv_cache_config, allocate)

        runner._allocate_kv_cache_tensors = allocate_kv_cache_tensors
        super().initialize_from_config(kv_cache_config)
        self.kvpp.start(self._layers(), hook=hook_layers)
        after_state_update(V1, runner, self.kvpp.step)

    def _layers(self) -> dict[str, Any]:
        """The engine's modules with a cache, by name."""
        layers: dict[str, Any] = self.vllm_config.compilation_config.static_forward_context
        return layers

"""A vLLM worker with KVPP: what it does differently at start and around a forward.

vLLM's executor makes the class that `parallel_config.worker_cls` names; being that class is what makes
KVPP active, so it cannot be left out silently.
"""

from functools import partial
from typing import Any

from vllm.config import CompilationMode
from vllm.v1.worker.gpu_worker import Worker

from kvpp_vllm.collectives import prepare_collectives
from kvpp_vllm.config import read_config
from kvpp_vllm.hooks import hook_layers
from kvpp_vllm.runners import RunnerKind, after_state_update, allocating, runner_kind
from kvpp_vllm.seams import GPU_SEAMS, Seam, check_seams
from kvpp_vllm.specs import cache_specs
from kvpp_vllm.steps import KvppSteps


class KvppWorker(KvppSteps, Worker):  # type: ignore[misc]
    """A worker whose KV cache is pipelined over its tensor-parallel group: on CUDA, not yet run there."""

    kvpp_runner: RunnerKind
    kvpp_seams: tuple[Seam, ...] = GPU_SEAMS

    def init_device(self) -> None:
        """Set up the device as vLLM does, then the KVPP group of this pipeline stage."""
        self.kvpp_runner = runner_kind(self.vllm_config)
        check_seams(self.kvpp_seams, runner=self.kvpp_runner.version)
        prepare_collectives(self.vllm_config)
        super().init_device()
        self.join_group(read_config(self.vllm_config.additional_config))

    def determine_available_memory(self) -> int:
        """The logical bytes that this worker's physical bytes are worth to the planner."""
        runner = self.model_runner
        available = super().determine_available_memory()
        specs = cache_specs(
            runner.get_kv_cache_spec(),
            drafts=self.kvpp_runner.draft_layers(runner),
            shared=self.kvpp_runner.shared_layers(runner),
        )
        override = self.cache_config.num_gpu_blocks_override
        return self.kvpp.budget(available, specs, override=override)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Initialise the KV cache on KVPP's storage, then start KVPP."""
        with allocating(self.kvpp_runner, self.kvpp.allocate):
            super().initialize_from_config(kv_cache_config)
        compilation = self.vllm_config.compilation_config
        compiled = compilation.mode != CompilationMode.NONE
        hook = partial(hook_layers, compiled=compiled)
        self.kvpp.start(compilation.static_forward_context, hook=hook)
        after_state_update(self.kvpp_runner, self.model_runner, self.kvpp.step)

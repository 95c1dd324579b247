"""What differs between vLLM's Model Runners V1 and V2, and the two places where KVPP reaches into a runner."""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvpp_dag.errors import NotActiveError

Allocate = Callable[[Any, Any, list[int] | None], dict[str, Any]]
"""Called with KV cache configuration, layout and kernel block sizes; returns a view per layer."""


@dataclass(frozen=True, kw_only=True)
class RunnerKind:
    """Where one generation of model runners lets KVPP in.

    `version` is that of Model Runner V1 or V2. `allocation_module` has imported `allocate_kv_cache` by name.
    `state_update` is the runner's method that takes the scheduler's output of a real step, and zeroes new
    blocks and copies shared ones; dummy and profiling runs never call it. `draft_layers` and `shared_layers`
    read from a runner which layers its speculator owns, and which layers use the cache of another.
    """

    version: int
    allocation_module: str
    state_update: str
    draft_layers: Callable[[Any], frozenset[str]]
    shared_layers: Callable[[Any], Mapping[str, str]]


def runner_kind(vllm_config: Any) -> RunnerKind:
    """The kind of model runner that workers of this configuration make."""
    return V2 if vllm_config.use_v2_model_runner else V1


@contextmanager
def allocating(kind: RunnerKind, allocate: Allocate) -> Iterator[None]:
    """Let the runner's `allocate_kv_cache` be `allocate` while the KV cache is initialised."""
    module: Any = importlib.import_module(kind.allocation_module)
    original = module.allocate_kv_cache

    def allocate_kv_cache(
        kv_cache_config: Any,
        device: Any,
        layout: Any,
        kernel_block_sizes: list[int] | None = None,
    ) -> dict[str, Any]:
        return allocate(kv_cache_config, layout, kernel_block_sizes)

    module.allocate_kv_cache = allocate_kv_cache
    try:
        yield
    finally:
        module.allocate_kv_cache = original


def after_state_update(kind: RunnerKind, runner: Any, begin: Callable[[Any], None]) -> None:
    """Call `begin` with the scheduler's output whenever this runner has updated its state.

    By then new blocks have been zeroed and shared blocks copied, which must not race with the first
    transfer; the input preparation that follows overlaps with it.
    """
    update: Callable[[Any], Any] = getattr(runner, kind.state_update)

    @functools.wraps(update)
    def update_and_begin(scheduler_output: Any) -> Any:
        result = update(scheduler_output)
        begin(scheduler_output)
        return result

    setattr(runner, kind.state_update, update_and_begin)


def _draft_layers_v1(runner: Any) -> frozenset[str]:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: PLC0415

    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, SpecDecodeBaseProposer):  # there is none, or it has no model with caches
        return frozenset()
    names = getattr(drafter, "_draft_attn_layer_names", None)
    if names is None:
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: {type(drafter).__name__} of the installed vLLM has "
            "no _draft_attn_layer_names, so that draft layers cannot be told from target layers; drop "
            "--speculative-config."
        )
    return frozenset(names)


def _draft_layers_v2(runner: Any) -> frozenset[str]:
    layers = runner.compilation_config.static_forward_context
    return frozenset(name for name, layer in layers.items() if getattr(layer, "is_draft_layer", False))


def _shared_layers_v1(runner: Any) -> Mapping[str, str]:
    shared: Mapping[str, str] = runner.shared_kv_cache_layers
    return shared


def _shared_layers_v2(runner: Any) -> Mapping[str, str]:
    from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers  # noqa: PLC0415

    shared: Mapping[str, str] = get_shared_kv_cache_layers(runner.vllm_config)
    return shared


V1 = RunnerKind(
    version=1,
    allocation_module="vllm.v1.worker.gpu_model_runner",
    state_update="_update_states",
    draft_layers=_draft_layers_v1,
    shared_layers=_shared_layers_v1,
)
V2 = RunnerKind(
    version=2,
    allocation_module="vllm.v1.worker.gpu.attn_utils",
    state_update="update_requests",
    draft_layers=_draft_layers_v2,
    shared_layers=_shared_layers_v2,
)

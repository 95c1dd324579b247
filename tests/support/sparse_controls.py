"""Real zeroing of new blocks, poisoned caches, and controls that a running engine is switched between.

Every name of `PHASES` becomes a worker method without arguments, for `EngineSpec.before`. It fills the whole KV cache
with NaN, so that a block is of use only where it was zeroed or written since, and then changes what this file says.
What was cached before is lost: give each phase prompts of its own.
"""

import ctypes
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvpp_dag.runtime import ForwardPass
from kvpp_vllm.history import has_history
from kvpp_vllm.rank import KvppRank
from kvpp_vllm.worker import KvppCPUWorker

PHASES = {
    "phase_right": "everything as it should be",
    "phase_nothing_sent": "no broadcast carries anything",
    "phase_main_sent": "a broadcast carries the main cache of its bundle only",
    "phase_indexer_sent": "a broadcast carries the indexer cache of its bundle only, if there is one",
    "phase_not_zeroed": "new blocks are not zeroed",
    "phase_owner_first": "a wrong order: rank 0, which owns the first layer, sends it before it zeroes new blocks",
}

JOURNAL: list[tuple[str, Any]] = []
"""What a KVPP worker did, in order: ("step", tokens), ("zeroed", blocks) and ("began", whether with history)."""


class Now:
    """The phase of this worker."""

    phase = "phase_right"


def apply() -> None:
    """Change the process: called once, before the engine is made."""
    # The scheduler gets one spec for all layers of a group, and so overlooks that fp8 and fp32 caches are mixed.
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)
    utils._zero_kv_blocks_kernel = MemsetKernel()
    CPUModelRunner._zero_block_ids = GPUModelRunner._zero_block_ids
    for phase in PHASES:
        setattr(CPUWorker, phase, _enter(phase))
    ForwardPass._transfer_of = _transfer_of
    _let_the_owner_be_first()
    _journal()


class MemsetKernel:
    """vLLM's Triton kernel that zeroes blocks, by the same table: addresses in bytes, strides and sizes in words.

    vLLM 0.32 zeroes no new blocks of these models: neither its scheduler nor its CPU runner asks for it. Here its GPU
    code acts, KVBlockZeroer included.
    """

    def __getitem__(self, grid: Any) -> Any:
        return self._zero

    def _zero(self, addresses: Any, strides: Any, sizes: Any, blocks: Any, **_: Any) -> None:
        if Now.phase == "phase_not_zeroed":
            return
        for address, stride, size in zip(
            addresses.tolist(), strides.tolist(), sizes.tolist(), strict=True
        ):
            for block in blocks.tolist():
                ctypes.memset(address + 4 * stride * block, 0, 4 * size)


def _enter(phase: str) -> Any:
    def enter(self: Any) -> None:
        Now.phase = phase
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            layer.kv_cache.view(torch.uint8).fill_(0xFF)  # a NaN in fp32, bf16 and fp8 alike

    return enter


def _transfer_of(self: ForwardPass, arena: Any, node: str, ordinal: int, skip: bool) -> Any:
    """`ForwardPass._transfer_of`, whose transfer looks at the phase."""
    owner = self.plan.owners[ordinal]
    sends = dict.fromkeys(("phase_nothing_sent", "phase_main_sent", "phase_indexer_sent"), _nothing)
    for component in self.plan.bundles[ordinal].spec.components:
        phase = "phase_indexer_sent" if "indexer" in component.name else "phase_main_sent"
        view = arena.component(ordinal, component.name).view(-1)
        sends[phase] = self._transport.prepare(view, owner)
    whole = self._transport.prepare(arena.cache(ordinal), owner)

    def send() -> None:
        sends.get(Now.phase, whole)()

    return _nothing if skip else send


def _nothing() -> None:
    """The transfer of a bundle that lacks what the phase sends."""


def _let_the_owner_be_first() -> None:
    stock_update, begin, start = GPUModelRunner._update_states, KvppRank.begin, KvppRank.start
    ranks: list[KvppRank] = []

    def started(self: KvppRank, layers: Any) -> None:
        ranks.append(self)
        start(self, layers)

    def update_states(self: Any, scheduler_output: Any) -> Any:
        first = Now.phase == "phase_owner_first" and ranks and ranks[0].rank == 0
        if first and scheduler_output.total_num_scheduled_tokens > 0:
            begin(ranks[0], history=has_history(scheduler_output))
            ranks[0]._running()._transfer.synchronize(60)
        return stock_update(self, scheduler_output)

    def begin_unless_begun(self: KvppRank, *, history: bool) -> None:
        if not self._running().active:
            begin(self, history=history)

    KvppRank.start, KvppRank.begin = started, begin_unless_begun
    GPUModelRunner._update_states = update_states


def _journal() -> None:
    zero, begin, step = (
        utils.KVBlockZeroer.zero_block_ids,
        KvppRank.begin,
        KvppCPUWorker.execute_model,
    )

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        JOURNAL.append(("step", scheduler_output.total_num_scheduled_tokens))
        return step(self, scheduler_output)

    def zero_block_ids(self: Any, block_ids: list[int]) -> None:
        JOURNAL.append(("zeroed", len(block_ids)))
        zero(self, block_ids)

    def began(self: KvppRank, *, history: bool) -> None:
        JOURNAL.append(("began", history))
        begin(self, history=history)

    utils.KVBlockZeroer.zero_block_ids, KvppRank.begin = zero_block_ids, began
    KvppCPUWorker.execute_model = execute_model
    KvppCPUWorker.kvpp_journal = lambda self: JOURNAL

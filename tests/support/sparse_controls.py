"""Real zeroing of new blocks, poisoned caches, and controls that a running engine is switched between.

Every name of `PHASES` becomes a worker method without arguments, for `EngineSpec.before`. It fills the whole KV cache
with NaN, so that a block is of use only where it was zeroed or written since, and then changes what this file says.
What was cached before is lost: give each phase prompts of its own.
"""

import ctypes
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvpp_dag.runtime import programs
from kvpp_dag.runtime.packing import Packing
from kvpp_vllm import hooks
from kvpp_vllm.history import has_history
from kvpp_vllm.rank import KvppRank
from kvpp_vllm.worker_cpu import KvppCPUWorker

PHASES = {
    "phase_right": "everything as it should be",
    "phase_nothing_sent": "no broadcast carries anything",
    "phase_main_sent": "a broadcast carries the main cache of its bundle only",
    "phase_indexer_sent": "a broadcast carries the indexer cache of its bundle only, if there is one",
    "phase_not_zeroed": "new blocks are not zeroed",
    "phase_acquired_late": "a compiled model waits where it updates the main cache, not in the indexer's operator, "
    "and the bundle arrives as late as that",
    "phase_owner_first": "a wrong order: rank 0, which owns the first layer, sends it before it zeroes new blocks",
}

JOURNAL: list[tuple[str, Any]] = []
"""What a KVPP worker did, in order: ("step", tokens), ("zeroed", blocks) and ("began", whether with history)."""


USED: defaultdict[int, threading.Event] = defaultdict(threading.Event)
"""By ordinal: set when the indexer of a compiled model has used its cache, in the phase in which it comes too early."""


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
    programs.send_bundle = _send_bundle
    _carry_nothing_of_chunks()
    _let_the_owner_be_first()
    _let_the_indexer_be_early()
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


def _send_bundle(transport: Any, arena: Any, ordinal: int) -> Any:
    """`programs.send_bundle`, whose transfer looks at the phase."""
    owner = arena.plan.owners[ordinal]
    sends = dict.fromkeys(("phase_nothing_sent", "phase_main_sent", "phase_indexer_sent"), _nothing)
    for component in arena.plan.bundles[ordinal].spec.components:
        phase = "phase_indexer_sent" if "indexer" in component.name else "phase_main_sent"
        view = arena.component(ordinal, component.name).view(-1)
        sends[phase] = transport.prepare(view, owner)
    whole = transport.prepare(arena.cache(ordinal), owner)
    has_indexer = len(arena.plan.bundles[ordinal].spec.components) > 1

    def send() -> None:
        if Now.phase == "phase_acquired_late" and has_indexer:
            USED[ordinal].clear()
            USED[ordinal].wait(1)  # it may have been used already
        sends.get(Now.phase, whole)()

    return send


def _carry_nothing_of_chunks() -> None:
    """Let chunks and runs of blocks look at the phase too, as far as whether anything is sent."""
    for name in ("send", "send_runs"):
        stock = getattr(Packing, name)

        def send(self: Packing, *chunk: int, stock: Any = stock) -> None:
            if Now.phase != "phase_nothing_sent":
                stock(self, *chunk)

        setattr(Packing, name, send)


def _nothing() -> None:
    """The transfer of a bundle that lacks what the phase sends."""


def _let_the_owner_be_first() -> None:
    stock_update, begin, start = GPUModelRunner._update_states, KvppRank.begin, KvppRank.start
    ranks: list[KvppRank] = []

    def started(self: KvppRank, layers: Any, **more: Any) -> None:
        ranks.append(self)
        start(self, layers, **more)

    def update_states(self: Any, scheduler_output: Any) -> Any:
        first = Now.phase == "phase_owner_first" and ranks and ranks[0].rank == 0
        if first and scheduler_output.total_num_scheduled_tokens > 0:
            nothing = np.zeros(0, dtype=np.int64)
            begin(ranks[0], history=has_history(scheduler_output), used=nothing, fresh=nothing)
            events = {event.name: event for event in ranks[0]._running()._program.events}
            if "completion[0]" in events:
                events["completion[0]"].synchronize(60)
        return stock_update(self, scheduler_output)

    def begin_unless_begun(self: KvppRank, **arguments: Any) -> None:
        if not self._running().active:
            begin(self, **arguments)

    KvppRank.start, KvppRank.begin = started, begin_unless_begun
    GPUModelRunner._update_states = update_states


class _UnhookedOperator:
    """What the indexer's operator sees of the forward: in the phase, as if none were in flight."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    @property
    def active(self) -> bool:
        return self._forward.active and Now.phase != "phase_acquired_late"

    def acquire(self, layer: int) -> None:
        self._forward.acquire(layer)


def _let_the_indexer_be_early() -> None:
    in_op, checked = hooks.acquire_in_indexer_op, hooks._acquired_before

    def acquire_in_indexer_op(forward: Any, ordinals: Any) -> Any:
        return in_op(_UnhookedOperator(forward), ordinals)

    def acquired_before(forward: Any, ordinal: int, original: Any) -> Any:
        right, late = (wrap(forward, ordinal, original) for wrap in (checked, hooks.acquiring))

        def call(*args: Any, **kwargs: Any) -> Any:
            if Now.phase != "phase_acquired_late":
                return right(*args, **kwargs)
            USED[ordinal].set()
            return late(*args, **kwargs)

        return call

    hooks.acquire_in_indexer_op, hooks._acquired_before = acquire_in_indexer_op, acquired_before


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

    def began(self: KvppRank, *, history: bool, **more: Any) -> None:
        JOURNAL.append(("began", history))
        begin(self, history=history, **more)

    utils.KVBlockZeroer.zero_block_ids, KvppRank.begin = zero_block_ids, began
    KvppCPUWorker.execute_model = execute_model
    KvppCPUWorker.kvpp_journal = lambda self: JOURNAL

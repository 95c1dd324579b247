"""KVPP on one vLLM worker: from its cache specs to running forwards, dumps and figures."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from kvpp_dag.errors import NotActiveError
from kvpp_dag.plan import CacheSpec, ModelPlan, StagePlan, capacity, capacity_multiplier, plan_stage
from kvpp_dag.plan.budget import check_fits, logical_budget, physical_blocks
from kvpp_dag.runtime import (
    Allocate,
    Arena,
    Costs,
    ForwardPass,
    Payload,
    SharedMemoryTransport,
    Streams,
    Transport,
    VerifyingTransport,
    allocate_zeroed,
    check_forwards,
    make_streams,
    measure_costs,
)
from kvpp_dag.runtime.payload import Ids
from kvpp_vllm.allocation import block_size, engine_views
from kvpp_vllm.blocks import BlockBook
from kvpp_vllm.config import KvppConfig
from kvpp_vllm.dumps import write_graphs
from kvpp_vllm.history import has_history
from kvpp_vllm.tracing import RankTrace

logger = logging.getLogger("vllm.kvpp")
T = TypeVar("T")
HookLayers = Callable[[ForwardPass, Mapping[str, Any]], Any]
"""Hooks the engine's layers, by name, into a forward; what it returns is kept as long as they are used."""


class KvppRank:
    """The KVPP state of one worker, filled in the order in which vLLM starts one.

    `rank` is the rank within the KVPP group, `stage` the pipeline stage, for names of files and logs.
    `device` is where the caches are, and decides on which streams the forwards run.
    """

    def __init__(
        self,
        *,
        config: KvppConfig,
        transport: Transport,
        stage: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.transport = VerifyingTransport(transport) if config.verify_transfers else transport
        self.device = torch.device(device)
        # What is sent through shared memory has to lie there.
        self._allocate: Allocate = partial(allocate_zeroed, device=self.device)
        if isinstance(transport, SharedMemoryTransport):
            self._allocate = transport.allocate
        self.stage = stage
        self.rank = transport.rank
        self.trace = RankTrace(config, stage=stage, rank=self.rank, ranks=transport.size)
        self._plan: StagePlan | None = None
        self._arena: Arena | None = None
        self._forward: ForwardPass | None = None
        self._book: BlockBook | None = None
        self._hooks: Any = None
        self._available = 0

    def budget(self, available: int, specs: Sequence[CacheSpec], *, override: int | None) -> int:
        """Plan this stage and return the bytes to report to the engine's planner.

        `available` are the worker's physical bytes, `override` the user's num_gpu_blocks_override.
        Raises ConfigError for a model that KVPP cannot serve, and CapacityError for an override that
        does not fit; both before memory is allocated.
        """
        plan = plan_stage(
            specs,
            ranks=self.transport.size,
            depth=self.config.depth,
            ownership=self.config.ownership,
            staging=self.config.payload is not Payload.FULL,
        )
        self._plan, self._available = plan, available
        if override is not None:
            check_fits(plan, self.rank, override, available)
        if warning := capacity(plan, available).warning:
            logger.warning("%s", warning)
        blocks = physical_blocks(plan, self.rank, available)
        return available if blocks is None else logical_budget(plan, blocks)

    def allocate(
        self, kv_cache_config: Any, layout: Any, kernel_block_sizes: list[int] | None
    ) -> dict[str, torch.Tensor]:
        """Allocate this rank's storage for the final block count, and return vLLM's views of it."""
        return engine_views(self.store(kv_cache_config), kv_cache_config, layout, kernel_block_sizes)

    def store(self, kv_cache_config: Any) -> Arena:
        """Allocate this rank's storage for the final block count."""
        plan, size = self._planned(), block_size(kv_cache_config)
        check_fits(plan, self.rank, kv_cache_config.num_blocks, self._available)
        self._arena = Arena(
            plan,
            rank=self.rank,
            num_blocks=kv_cache_config.num_blocks,
            allocate=self._allocate,
        )
        self._book = BlockBook(num_blocks=kv_cache_config.num_blocks, block_size=size)
        return self._arena

    def start(self, layers: Mapping[str, Any], *, hook: HookLayers) -> None:
        """Compile and verify the forwards, agree with the other ranks, check that they work, and hook the layers.

        `hook` hooks `layers`, the engine's by name. Raises DivergenceError if ranks have planned
        differently, and SelfCheckError if what was sent is not what arrived. Nothing of it is left on the
        device when it returns.
        """
        if self._arena is None:
            raise NotActiveError(
                "KVPP was asked for and is not active: the engine initialised its KV cache without "
                "calling its model runner's allocation."
            )
        timeout = self.config.timeout_s
        streams = make_streams(self.device, timeout=2 * timeout, completion=self.config.completion)
        self._forward = ForwardPass(
            arena=self._arena,
            transport=self.transport,
            compute=streams.compute,
            transfer=streams.transfer,
            copy=streams.copy,
            control=streams.control,
            policy=self.config.policy,
            payload=self.config.payload,
            costs=self._measure(streams),
            observer=self.trace.recorder,
            timeout=2 * timeout,
            skip_broadcasts=self.config.skip_broadcasts,
            compare_blocks=self.config.verify_transfers,
            profiled=self.config.profiler_ranges,
        )
        self.transport.agree(self._forward.signature)
        if self._checks_itself():
            checked = check_forwards(
                self._forward,
                arena=self._arena,
                transport=self.transport,
                streams=streams,
                timeout=2 * timeout,
            )
            logger.info(
                "KVPP rank %d, stage %d: self check passed: %s.", self.rank, self.stage, checked.text()
            )
        # An engine may run its forwards on another current stream than this one, which made the arena.
        streams.compute.synchronize(2 * timeout)
        self.trace.start(self._planned(), self._arena.num_blocks, self._forward.synchronize)
        self._hooks = hook(self._forward, layers)
        if self.config.trace_dir:
            write_graphs(self.config.trace_dir, self._forward.graphs, name=self.trace.name)
        if self.config.skip_broadcasts:
            logger.warning("KVPP skips every broadcast (a control run): outputs will be wrong.")
        logger.info("%s", self._start_line())

    def step(self, scheduler_output: Any) -> None:
        """Take in an output of the scheduler, and begin the forward of its step if it runs one."""
        used, fresh = _there(self._book).step(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens > 0:
            self.begin(history=has_history(scheduler_output), used=used, fresh=fresh)

    def begin(self, *, history: bool, used: Ids, fresh: Ids) -> None:
        """Begin a forward of the engine, as `ForwardPass.begin` does."""
        self._running().begin(history=history, used=used, fresh=fresh)

    def end(self) -> None:
        """End the forward in flight, if the step ran one."""
        forward = self._running()
        if forward.active:
            forward.end()
            self.trace.ended(forward.forwards)

    def abort(self, error: BaseException) -> None:
        """Drain the forward in flight after `error`, and keep its trace where traces are asked for."""
        if self._forward is not None and self._forward.active:
            self._forward.abort(error)
            self.trace.aborted(self._forward.forwards, error)

    def write_trace(self) -> str | None:
        """Write the recorded forwards now, if a trace_dir is set; returns the path of the recording."""
        return self.trace.write()

    def stats(self) -> dict[str, Any]:
        """Figures of this rank since its start: blocks, bytes held, forwards, broadcasts, bytes sent."""
        forward, arena, plan = self._running(), self._stored(), self._planned()
        recorded = self.trace.summary()
        return {
            "rank": self.rank,
            "stage": self.stage,
            "layers_owned": [bundle.layer for bundle in plan.owned(self.rank)],
            "draft_layers": [spec.layer for spec in plan.drafts],
            "blocks": arena.num_blocks,
            "blocks_without_kvpp": capacity(plan, self._available).without,
            "capacity_multiplier": capacity_multiplier(ModelPlan(stages=(plan,))),
            "kv_bytes": arena.nbytes,
            "forwards": forward.forwards,
            "forwards_with_history": forward.forwards_with_history,
            "broadcasts": forward.broadcasts_sent,
            "bytes_broadcast": forward.bytes_sent,
            "summary": recorded.text() if recorded else None,
        }

    def _start_line(self) -> str:
        forward, plan, arena = self._running(), self._planned(), self._stored()
        owned = [bundle.ordinal for bundle in plan.owned(self.rank)]
        most = "" if forward.payload is Payload.FULL else "at most "
        layers = f"layers {owned[0]}-{owned[-1]}" if owned else "no layer"
        return (
            f"KVPP rank {self.rank} of {plan.ranks}, stage {self.stage}: owns {layers} of "
            f"{len(plan.bundles)}; {arena.num_blocks} blocks with KVPP, "
            f"{capacity(plan, self._available).without} without; payload {forward.payload}, "
            f"policy {self.config.policy}, depth {plan.depth}; {most}{forward.bytes_per_forward} bytes "
            "broadcast per forward with history"
        )

    def _measure(self, streams: Streams) -> Costs | None:
        """What transfers and copies cost here, if there is a choice between ways to send."""
        plan = self._planned()
        if not plan.staging or not plan.bundles:
            return None
        costs = measure_costs(
            arena=self._stored(),
            transport=self.transport,
            compute=streams.compute,
            transfer=streams.transfer,
            copy=streams.copy,
            timeout=2 * self.config.timeout_s,
        )
        logger.debug("KVPP measured %s.", costs)
        return costs

    def _checks_itself(self) -> bool:
        """Whether there is anything to check, and the user or the device asks for it."""
        plan, asked = self._planned(), self.config.self_check
        if asked is None:
            asked = self.device.type != "cpu" and not self.config.skip_broadcasts
        return asked and plan.ranks > 1 and bool(plan.bundles)

    def _planned(self) -> StagePlan:
        return _there(self._plan)

    def _stored(self) -> Arena:
        return _there(self._arena)

    def _running(self) -> ForwardPass:
        return _there(self._forward)


def _there(value: T | None) -> T:
    if value is None:
        raise NotActiveError("KVPP was used before vLLM had planned and initialised its KV cache.")
    return value

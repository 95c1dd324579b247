"""Bytes to blocks and back: how much KV cache a worker can promise to the engine's planner.

The engine plans with *logical* bytes, in which every layer of a stage counts. A worker holds
*physical* bytes: its owned bundles, its draft caches, and the scratch slots (row P5), and with payload
`active` or `auto` two staging halves.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace

from kvpp_dag.errors import CapacityError
from kvpp_dag.plan.stage import STAGING_PART, ModelPlan, StagePlan


def owned_bytes_per_block(plan: StagePlan, rank: int) -> int:
    """Bytes per block of the persistent buffers of `rank`, without drafts and scratch."""
    return sum(bundle.bytes_per_block for bundle in plan.owned(rank))


def draft_bytes_per_block(plan: StagePlan) -> int:
    """Bytes per block of the draft caches, which every rank holds."""
    return sum(spec.bytes_per_block for spec in plan.drafts)


def scratch_bytes_per_block(plan: StagePlan) -> int:
    """Bytes per block of all scratch slots."""
    return plan.slots * plan.largest_bundle


def staging_bytes_per_block(plan: StagePlan) -> float:
    """Bytes per block of both staging halves, in the limit of a large cache; 0 without staging.

    Beside a small cache they are larger, see `StagePlan.staging_blocks`.
    """
    return 2 * plan.largest_bundle / STAGING_PART if plan.staging else 0


def physical_bytes_per_block(plan: StagePlan, rank: int) -> int:
    """Bytes that one block costs on `rank`: owned bundles + drafts + slots x largest bundle.

    Staging halves come on top, see `physical_bytes`: their share of a block depends on how many there are.
    """
    return (
        owned_bytes_per_block(plan, rank) + draft_bytes_per_block(plan) + scratch_bytes_per_block(plan)
    )


def physical_bytes(plan: StagePlan, rank: int, blocks: int) -> int:
    """Bytes that `rank` holds for `blocks` blocks, the two staging halves included."""
    staging = 2 * plan.staging_blocks(blocks) * plan.largest_bundle
    return blocks * physical_bytes_per_block(plan, rank) + staging


def logical_bytes_per_block(plan: StagePlan) -> int:
    """Bytes that one block costs on every rank without KVPP: all layers of the stage."""
    return sum(b.bytes_per_block for b in plan.bundles) + draft_bytes_per_block(plan)


def worst_physical_bytes_per_block(plan: StagePlan) -> float:
    """Bytes that one block of a large cache costs on the fullest rank of the group, staging included."""
    worst = max(physical_bytes_per_block(plan, rank) for rank in range(plan.ranks))
    return worst + staging_bytes_per_block(plan)


def physical_blocks(plan: StagePlan, rank: int, available: int) -> int | None:
    """Blocks that `available` bytes hold on `rank`; None for a stage that caches nothing."""
    per_block = physical_bytes_per_block(plan, rank)
    if per_block == 0:
        return None
    available = max(available, 0)
    counts = range(available // per_block + 1)  # more would not fit even without staging
    return bisect_right(counts, available, key=lambda blocks: physical_bytes(plan, rank, blocks)) - 1


def logical_budget(plan: StagePlan, blocks: int) -> int:
    """The bytes to report to a planner that divides by `logical_bytes_per_block`."""
    return blocks * logical_bytes_per_block(plan)


def check_fits(plan: StagePlan, rank: int, blocks: int, available: int) -> None:
    """Raise CapacityError if `blocks` blocks do not fit into `available` bytes on `rank`.

    An engine lets its user override the planned block count, and takes the number as it is.
    """
    fitting = physical_blocks(plan, rank, available)
    if fitting is not None and blocks > fitting:
        raise CapacityError(
            f"{blocks} KV cache blocks were asked for, but rank {rank} has room for {fitting} "
            f"({physical_bytes(plan, rank, blocks)} bytes needed, {available} available); lower "
            "num_gpu_blocks_override or give the KV cache more memory."
        )


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Blocks without KVPP, with it, and with it but no staging, in the same memory per worker."""

    without: int
    with_kvpp: int
    with_payload_full: int

    @property
    def warning(self) -> str | None:
        """A sentence if KVPP holds fewer blocks than the engine would without it, else None."""
        if self.with_kvpp >= self.without:
            return None
        if self.with_payload_full >= self.without:
            return (
                f"KVPP holds {self.with_kvpp} blocks where {self.without} fit without it, because the "
                'two staging halves take more than ownership saves; set "kvpp": {"payload": "full"}, which '
                f"sends whole bundles, needs no staging and holds {self.with_payload_full}."
            )
        return (
            f"KVPP holds {self.with_kvpp} blocks where {self.without} fit without it, because few "
            "layers per stage leave the scratch buffers larger than what ownership saves; turn "
            "enable_kvpp off or use fewer pipeline stages."
        )


def capacity(plan: StagePlan, available: int) -> Capacity:
    """Blocks of a stage with and without KVPP, given `available` bytes on each of its workers.

    The worst rank decides. For a stage that caches nothing all counts are 0.
    """
    logical = logical_bytes_per_block(plan)
    return Capacity(
        without=max(available, 0) // logical if logical else 0,
        with_kvpp=_worst_blocks(plan, available),
        with_payload_full=_worst_blocks(replace(plan, staging=False), available),
    )


def _worst_blocks(plan: StagePlan, available: int) -> int:
    counts = [physical_blocks(plan, rank, available) for rank in range(plan.ranks)]
    return min((count for count in counts if count is not None), default=0)


def model_blocks(plan: ModelPlan, available: int) -> int:
    """Blocks of the whole model: the minimum over its stages that cache something."""
    counts = [capacity(s, available).with_kvpp for s in plan.stages if logical_bytes_per_block(s)]
    return min(counts, default=0)


def capacity_multiplier(plan: ModelPlan) -> float:
    """How many times more blocks the model holds with KVPP, rounding to whole blocks aside.

    Without KVPP the largest stage decides, with it the worst rank of any stage. With staging this is the
    limit for large caches, a half being a sixteenth of the largest bundle's cache; a small cache holds
    fewer blocks, as a half may be an eighth (see `StagePlan.staging_blocks`). 1.0 for a model that caches
    nothing.
    """
    without = max(logical_bytes_per_block(stage) for stage in plan.stages)
    worst = max(worst_physical_bytes_per_block(stage) for stage in plan.stages)
    return without / worst if worst else 1.0

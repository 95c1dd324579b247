"""The plan of one pipeline stage, and of a model: what is stored where.

A `StagePlan` is the single source for budget, allocation, prefetch and verification; every rank of a
KVPP group computes the same one from the same cache specs.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan.ownership import Ownership, owner_of, partition, partition_bytes
from kvpp_dag.plan.specs import Bundle, CacheSpec, split_targets

LAYOUT_VERSION = 2
LEAST_CHUNK = 1 << 20
"""Bytes below which a chunk costs more to start than to carry."""
STAGING_PART = 16
"""A staging half is a sixteenth of the largest bundle's cache, if that is large."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Ownership and storage of one pipeline stage.

    `owners[i]` is the owner rank of ordinal `i`. `depth` is the prefetch depth; there are
    `depth + 1` scratch slots, each as large as the largest bundle. `drafts` are the specs that every
    rank of the stage stores for itself. `staging` says that there are two staging halves, through which
    packed blocks are sent.
    """

    bundles: tuple[Bundle, ...]
    drafts: tuple[CacheSpec, ...]
    ranks: int
    depth: int
    owners: tuple[int, ...]
    staging: bool = False

    @property
    def slots(self) -> int:
        """Number of scratch slots."""
        return self.depth + 1

    def slot(self, ordinal: int) -> int:
        """The scratch slot that a rank which does not own `ordinal` receives it into."""
        return ordinal % self.slots

    def owned(self, rank: int) -> tuple[Bundle, ...]:
        """The bundles that `rank` keeps in persistent buffers."""
        return tuple(b for b in self.bundles if self.owners[b.ordinal] == rank)

    @property
    def largest_bundle(self) -> int:
        """Bytes per block of the largest bundle; 0 for a stage without target layers."""
        return max((bundle.bytes_per_block for bundle in self.bundles), default=0)

    def staging_blocks(self, num_blocks: int) -> int:
        """Blocks of the largest bundle that one staging half holds beside `num_blocks` blocks of cache.

        A sixteenth of the cache, so that a batch that uses half of it travels in eight chunks; of a small
        cache more, up to an eighth, as chunks of less than a MiB cost more than they carry. 0 without
        staging.
        """
        if not self.staging or not self.largest_bundle:
            return 0
        sensible = min(ceil_div(num_blocks, 8), ceil_div(LEAST_CHUNK, self.largest_bundle))
        return max(ceil_div(num_blocks, STAGING_PART), sensible)

    @cached_property
    def layout_hash(self) -> str:
        """Digest of everything two ranks must agree on before one sends to the other.

        Covers component order and bytes, layer order, owners, group size and slots. Draft caches are
        left out: they are never sent.
        """
        content = {
            "version": LAYOUT_VERSION,
            "staging": self.staging,
            "ranks": self.ranks,
            "depth": self.depth,
            "owners": self.owners,
            "bundles": [
                [b.layer, b.spec.index, [[c.name, c.bytes_per_block] for c in b.spec.components]]
                for b in self.bundles
            ],
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The plans of all pipeline stages, in order; the smallest stage decides the block count."""

    stages: tuple[StagePlan, ...]


def plan_stage(
    specs: Sequence[CacheSpec],
    *,
    ranks: int,
    depth: int = 1,
    ownership: Ownership = Ownership.COUNT,
    staging: bool = False,
) -> StagePlan:
    """Plan one stage from the cache specs that its worker reports.

    `staging` reserves the two halves that payloads `active` and `auto` need, if the group has more than
    one rank. Raises ConfigError where the specs cannot be served (see `split_targets`) or `depth < 1`.
    """
    if depth < 1:
        raise ConfigError(f"The prefetch depth is {depth}; expected 1 or more.")
    bundles, drafts = split_targets(specs)
    if ownership is Ownership.BYTES:
        parts = partition_bytes([bundle.bytes_per_block for bundle in bundles], ranks)
    else:
        parts = partition(len(bundles), ranks)
    owners = owner_of(parts)
    return StagePlan(
        bundles=bundles,
        drafts=drafts,
        ranks=ranks,
        depth=depth,
        owners=owners,
        staging=staging and ranks > 1,
    )


def plan_model(
    stages: Sequence[Sequence[CacheSpec]],
    *,
    ranks: int,
    depth: int = 1,
    ownership: Ownership = Ownership.COUNT,
    staging: bool = False,
) -> ModelPlan:
    """Plan every pipeline stage; `stages` holds the cache specs of each, in stage order.

    A stage without attention layers gets an empty plan. The settings mean what they do in `plan_stage`,
    and ConfigError is raised as there.
    """
    return ModelPlan(
        stages=tuple(
            plan_stage(specs, ranks=ranks, depth=depth, ownership=ownership, staging=staging)
            for specs in stages
        )
    )


def ceil_div(amount: int, size: int) -> int:
    """How many pieces of `size` hold `amount`."""
    return -(-amount // size)

"""The plan of one pipeline stage, and of a model: what is stored where.

A `StagePlan` is the single source for budget, allocation, prefetch and verification; every rank of a
KVPP group computes the same one from the same cache specs.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan.ownership import owner_of, partition
from kvpp_dag.plan.specs import Bundle, CacheSpec, split_targets

LAYOUT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Ownership and storage of one pipeline stage.

    `owners[i]` is the owner rank of ordinal `i`. `depth` is the prefetch depth; there are
    `depth + 1` scratch slots, each as large as the largest bundle. `drafts` are the specs that every
    rank of the stage stores for itself.
    """

    bundles: tuple[Bundle, ...]
    drafts: tuple[CacheSpec, ...]
    ranks: int
    depth: int
    owners: tuple[int, ...]

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

    @property
    def layout_hash(self) -> str:
        """Digest of everything two ranks must agree on before one sends to the other.

        Covers component order and bytes, layer order, owners, group size and slots. Draft caches are
        left out: they are never sent.
        """
        content = {
            "version": LAYOUT_VERSION,
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


def plan_stage(specs: Sequence[CacheSpec], *, ranks: int, depth: int = 1) -> StagePlan:
    """Plan one stage from the cache specs that its worker reports.

    Raises ConfigError where the specs cannot be served (see `split_targets`) or `depth < 1`.
    """
    if depth < 1:
        raise ConfigError(f"The prefetch depth is {depth}; expected 1 or more.")
    bundles, drafts = split_targets(specs)
    owners = owner_of(partition(len(bundles), ranks))
    return StagePlan(bundles=bundles, drafts=drafts, ranks=ranks, depth=depth, owners=owners)


def plan_model(stages: Sequence[Sequence[CacheSpec]], *, ranks: int, depth: int = 1) -> ModelPlan:
    """Plan every pipeline stage; `stages` holds the cache specs of each, in stage order.

    A stage without attention layers gets an empty plan. Raises ConfigError as `plan_stage` does.
    """
    return ModelPlan(stages=tuple(plan_stage(s, ranks=ranks, depth=depth) for s in stages))

"""What a layer caches: components, cache specs and bundles.

Sizes are bytes per *block*, a block being the engine's unit of KV allocation. A preset that states
bytes per token is a plan with one token per block; every ratio stays the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpp_dag.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Component:
    """One contiguous cache inside a bundle: main KV, indexer KV, or the scales of either."""

    name: str
    bytes_per_block: int

    def __post_init__(self) -> None:
        if self.bytes_per_block <= 0:
            raise ConfigError(
                f"Component {self.name!r} has {self.bytes_per_block} bytes per block; a component "
                "needs at least one byte, so leave it out of the cache spec if the layer has none."
            )


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The cache of one attention layer as the engine reports it.

    `index` is the layer index of the model, global over pipeline stages; a draft layer may have none
    or share a target layer's. `components` are in the order in which they lie inside the bundle.
    `group` names the engine's cache group; `replicated` is false for a cache whose heads are split
    over the ranks already, which KVPP has nothing to win on.
    """

    layer: str
    index: int | None
    components: tuple[Component, ...]
    draft: bool = False
    shares_cache_of: str | None = None
    group: str = "mla"
    replicated: bool = True

    @property
    def bytes_per_block(self) -> int:
        """Bytes of all components for one block."""
        return sum(component.bytes_per_block for component in self.components)

    def component_offset(self, name: str, num_blocks: int) -> int:
        """Byte offset of component `name` in storage that holds `num_blocks` blocks of this cache.

        Raises KeyError if the cache has no such component.
        """
        offset = 0
        for component in self.components:
            if component.name == name:
                return offset
            offset += component.bytes_per_block * num_blocks
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """All components of one target layer, owned and sent as one contiguous piece.

    `ordinal` is the position of the layer in its stage's execution order, from 0.
    """

    ordinal: int
    spec: CacheSpec

    @property
    def layer(self) -> str:
        """Name of the layer, as the engine knows it."""
        return self.spec.layer

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the whole bundle for one block."""
        return self.spec.bytes_per_block

    def component_offset(self, name: str, num_blocks: int) -> int:
        """As `CacheSpec.component_offset`: a bundle is laid out as its cache spec says."""
        return self.spec.component_offset(name, num_blocks)


def split_targets(specs: Sequence[CacheSpec]) -> tuple[tuple[Bundle, ...], tuple[CacheSpec, ...]]:
    """Return the target bundles of a stage in execution order, and its draft specs.

    Raises ConfigError for what a partition by layer cannot serve: hybrid models, layers that use
    another layer's cache, caches that are not replicated, two targets with one name or index, and
    targets without an index.
    """
    targets = [spec for spec in specs if not spec.draft]
    drafts = [spec for spec in specs if spec.draft]
    _reject_unsupported(targets, drafts)
    targets.sort(key=lambda spec: -1 if spec.index is None else spec.index)
    bundles = tuple(Bundle(ordinal=i, spec=spec) for i, spec in enumerate(targets))
    return bundles, tuple(drafts)


def _reject_unsupported(targets: Sequence[CacheSpec], drafts: Sequence[CacheSpec]) -> None:
    names: set[str] = set()
    indices: dict[int, str] = {}
    for spec in (*targets, *drafts):
        if spec.layer in names:
            raise ConfigError(
                f"Layer {spec.layer!r} was reported twice; every layer needs one cache spec."
            )
        names.add(spec.layer)
        if spec.shares_cache_of is not None:
            raise ConfigError(
                f"Layer {spec.layer!r} uses the cache of {spec.shares_cache_of!r}; KVPP needs a cache "
                "of its own for every layer, so run this model with enable_kvpp off."
            )
        if not spec.components:
            raise ConfigError(
                f"Layer {spec.layer!r} reports a cache without components; expected at least one."
            )
        if len({component.name for component in spec.components}) < len(spec.components):
            raise ConfigError(
                f"Layer {spec.layer!r} reports two components of one name among "
                f"{', '.join(c.name for c in spec.components)}; give each a name of its own."
            )
    groups = sorted({spec.group for spec in targets})
    if len(groups) > 1:
        raise ConfigError(
            f"The model is hybrid: its layers are in the cache groups {', '.join(groups)}; KVPP needs "
            "one group, so run this model with enable_kvpp off."
        )
    for spec in targets:
        if not spec.replicated:
            raise ConfigError(
                f"Layer {spec.layer!r} keeps a KV cache that tensor parallelism already splits; KVPP "
                "serves MLA and sparse (SFA/DSA) attention, so run this model with enable_kvpp off."
            )
        if spec.index is None:
            raise ConfigError(
                f"Target layer {spec.layer!r} has no layer index; mark it as a draft layer or give "
                "its index, from which the execution order follows."
            )
        if spec.index in indices:
            raise ConfigError(
                f"Target layers {indices[spec.index]!r} and {spec.layer!r} share layer index "
                f"{spec.index}; put their components in one cache spec or mark one as a draft layer."
            )
        indices[spec.index] = spec.layer

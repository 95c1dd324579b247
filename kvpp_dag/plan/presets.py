"""Cache shapes of known models, read from the JSON files in `preset_data`.

Each file states its source, so that a shape can be corrected without touching code. Sizes are bytes
per token: a preset plans blocks of one token.
"""

from importlib.resources import files

from pydantic import BaseModel, ConfigDict, Field

from kvpp_dag.errors import ConfigError
from kvpp_dag.plan.specs import CacheSpec, Component

_DIRECTORY = "preset_data"


class IndexerLayers(BaseModel):
    """Which layers have an indexer cache: layer `l` does if `max(l - offset + 1, 0) % freq == 0`.

    This is how GLM's configuration spaces its indexers (`index_topk_freq`,
    `index_skip_topk_offset`); `freq` 1 means every layer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    freq: int = Field(ge=1)
    offset: int = Field(ge=0)

    def has_indexer(self, layer: int) -> bool:
        """Whether target layer `layer` has an indexer cache."""
        return max(layer - self.offset + 1, 0) % self.freq == 0


class Preset(BaseModel):
    """One model: layer counts, components of the main and indexer caches in bytes per token."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    model: str
    source: str
    layers: int = Field(ge=1)
    mtp_layers: int = Field(ge=0)
    main: dict[str, int]
    indexer: dict[str, int] = Field(default_factory=dict)
    indexer_layers: IndexerLayers | None = None

    def layer_spec(self, layer: int, *, draft: bool = False) -> CacheSpec:
        """The cache spec of one layer; draft layers have an indexer wherever the model has any."""
        sizes = dict(self.main)
        if self.indexer_layers and (draft or self.indexer_layers.has_indexer(layer)):
            sizes |= self.indexer
        components = tuple(Component(name=n, bytes_per_block=b) for n, b in sizes.items())
        return CacheSpec(layer=f"model.layers.{layer}", index=layer, components=components, draft=draft)


def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    entries = files(__package__).joinpath(_DIRECTORY).iterdir()
    return tuple(sorted(e.name.removesuffix(".json") for e in entries if e.name.endswith(".json")))


def load_preset(name: str) -> Preset:
    """Read a preset by name. Raises ConfigError, with the known names, if there is none."""
    names = preset_names()
    if name not in names:
        raise ConfigError(f"There is no preset {name!r}; expected one of {', '.join(names)}.")
    text = files(__package__).joinpath(_DIRECTORY, f"{name}.json").read_text(encoding="utf-8")
    return Preset.model_validate_json(text)


def preset_stages(
    preset: Preset, *, pp: tuple[int, ...] | None = None, mtp: bool = False
) -> tuple[tuple[CacheSpec, ...], ...]:
    """Cache specs per pipeline stage; `pp` gives the target layers of each stage.

    Draft layers, if `mtp`, belong to the last stage. Raises ConfigError if `pp` does not sum to the
    model's layers.
    """
    counts = pp if pp is not None else (preset.layers,)
    if sum(counts) != preset.layers or any(count < 0 for count in counts):
        raise ConfigError(
            f"The stages {','.join(map(str, counts))} hold {sum(counts)} layers, but {preset.model} "
            f"has {preset.layers}; give the layers of every stage so that they add up."
        )
    stages: list[tuple[CacheSpec, ...]] = []
    start = 0
    for count in counts:
        stages.append(tuple(preset.layer_spec(i) for i in range(start, start + count)))
        start += count
    if mtp:
        drafts = range(preset.layers, preset.layers + preset.mtp_layers)
        stages[-1] += tuple(preset.layer_spec(i, draft=True) for i in drafts)
    return tuple(stages)

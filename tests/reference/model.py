"""A small model with sparse MLA: an indexer picks, per token, the positions that attention reads.

As in GLM, only some layers have an indexer; the others read the positions that an earlier layer picked.
Heads are split over the tensor-parallel ranks; what each cached token costs is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import relu

from kvpp_dag.plan import CacheSpec
from tests.reference.caches import INDEX, LATENT, ROPE, Caches, LayerCache, cache_spec
from tests.reference.scheduler import Batch

Gather = Callable[[torch.Tensor], torch.Tensor]
"""From this rank's heads [tokens, some heads, ...] to all heads, on every rank."""

Picks = list[torch.Tensor]
"""Per chunk, the positions that each of its tokens reads: [tokens, at most topk]."""

SHARPNESS = 3.0
"""Lets random weights look at few positions, so that an output hangs on each of them."""

TOKEN_WEIGHT = 2.0
"""How much of an output is due to the last token alone, so that some drafts are right."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model; the cached ones are in `caches`."""

    layers: int = 8
    indexers: frozenset[int] = frozenset({0, 1, 4, 7})
    vocab: int = 7
    hidden: int = 48
    heads: int = 6
    index_heads: int = 2
    topk: int = 16

    def specs(self, layers: range, layout: str, *, last: bool) -> list[CacheSpec]:
        """Cache specs of one stage; the last one has the MTP layer."""
        names = [(i, f"layers.{i}", i in self.indexers) for i in layers]
        specs = [cache_spec(name, i, layout, indexer=has) for i, name, has in names]
        draft = cache_spec("mtp.0", self.layers, layout, indexer=True, draft=True)
        return [*specs, draft] if last else specs


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (j, j + half) of the last dimension by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    angle = angle.view(len(positions), *[1] * (x.dim() - 2), half)
    left, right = x[..., :half], x[..., half:]
    sin, cos = angle.sin(), angle.cos()
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Weights:
    """Random weights, equal on every rank for one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, *columns: int) -> torch.Tensor:
        return torch.randn(rows, *columns, generator=self._generator) / rows**0.5


class Layer:
    """One decoder layer; `heads` are those of this rank."""

    def __init__(
        self, config: Config, name: str, seed: int, *, indexer: bool, heads: slice, gather: Gather
    ) -> None:
        new, hidden = Weights(seed), config.hidden
        self.name, self.indexer = name, indexer
        self._topk, self._index_heads, self._gather = config.topk, config.index_heads, gather
        self._query = new(hidden, config.heads, LATENT + ROPE)[:, heads].flatten(1)
        self._kv = new(hidden, LATENT + ROPE)
        self._out = new(config.heads * LATENT, hidden)
        self._up, self._down = new(hidden, 2 * hidden), new(2 * hidden, hidden)
        if indexer:
            self._index_query = new(hidden, config.index_heads * INDEX)
            self._index_weight = new(hidden, config.index_heads)
            self._index_key = new(hidden, INDEX)

    def __call__(
        self, x: torch.Tensor, batch: Batch, caches: Caches, picks: Picks
    ) -> tuple[torch.Tensor, Picks]:
        h, positions = norm(x), torch.cat(batch.positions)
        query = (h @ self._query).unflatten(-1, (-1, LATENT + ROPE))
        query = torch.cat([query[..., :LATENT], rope(query[..., LATENT:], positions)], dim=-1)
        kv = h @ self._kv
        kv = torch.cat([norm(kv[:, :LATENT]), rope(kv[:, LATENT:], positions)], dim=-1)
        with caches.held(self.name) as cache:
            if self.indexer:
                cache.write_keys(batch.slots, h @ self._index_key)
                picks = self._pick(h, batch, cache)
            cache.write_main(batch.slots, kv)
            attended = self._attend(query, batch, cache, picks)
        x = x + self._gather(attended).flatten(1) @ self._out
        return x + (norm(x) @ self._up).tanh() @ self._down, picks

    def _pick(self, h: torch.Tensor, batch: Batch, cache: LayerCache) -> Picks:
        queries = (h @ self._index_query).unflatten(-1, (self._index_heads, INDEX))
        weights = h @ self._index_weight
        picks = []
        for query, weight, positions, context in zip(
            queries.split(batch.sizes),
            weights.split(batch.sizes),
            batch.positions,
            batch.contexts,
            strict=True,
        ):
            keys = cache.read_keys(context)
            scores = (relu(query @ keys.T) * weight[..., None]).sum(1)
            future = torch.arange(len(context)) > positions[:, None]
            scores = scores.masked_fill(future, -torch.inf)
            picks.append(scores.topk(min(self._topk, len(context))).indices)
        return picks

    def _attend(
        self, queries: torch.Tensor, batch: Batch, cache: LayerCache, picks: Picks
    ) -> torch.Tensor:
        attended = []
        for query, picked, positions, context in zip(
            queries.split(batch.sizes), picks, batch.positions, batch.contexts, strict=True
        ):
            kv = cache.read_main(context)[picked]
            scores = query @ kv.transpose(1, 2) * SHARPNESS / (LATENT + ROPE) ** 0.5
            future = picked > positions[:, None]  # where fewer than topk positions lie behind
            scores = scores.masked_fill(future[:, None], -torch.inf)
            attended.append(scores.softmax(-1) @ kv[..., :LATENT])
        return torch.cat(attended)


class Stage:
    """The layers of one pipeline stage, the embedding, and on the last stage head and MTP layer."""

    def __init__(self, config: Config, layers: range, *, heads: slice, gather: Gather) -> None:
        shared = Weights(0)
        self._embedding = shared(config.vocab, config.hidden) * config.vocab**0.5 * TOKEN_WEIGHT
        self._head = shared(config.hidden, config.vocab)
        self._join = shared(config.hidden, config.hidden)

        def layer(name: str, index: int, *, indexer: bool) -> Layer:
            return Layer(config, name, 1 + index, indexer=indexer, heads=heads, gather=gather)

        self._layers = [layer(f"layers.{i}", i, indexer=i in config.indexers) for i in layers]
        self._mtp = layer("mtp.0", config.layers, indexer=True)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._embedding[tokens]

    def __call__(
        self, x: torch.Tensor, batch: Batch, caches: Caches, picks: Picks
    ) -> tuple[torch.Tensor, Picks]:
        """Run the stage's layers; `picks` are those of the last indexer before this stage."""
        for layer in self._layers:
            x, picks = layer(x, batch, caches, picks)
        return x, picks

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return norm(x) @ self._head

    def draft_logits(
        self, x: torch.Tensor, following: Sequence[int], batch: Batch, caches: Caches
    ) -> torch.Tensor:
        """Logits of the token after next: `following` are the tokens after the rows of `x`."""
        joined = self.embed(torch.tensor(following)) + norm(x) @ self._join
        return self.logits(self._mtp(joined, batch, caches, [])[0])

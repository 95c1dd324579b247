"""One rank of the reference engine: forwards over a stage, sampling, drafts, and what goes between ranks.

Ranks are numbered stage by stage. Every rank runs the same scheduler; the last rank tells all others
the sampled tokens.
"""

import datetime
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from kvpp_dag.runtime import ProcessGroupTransport, Transport
from tests.reference.caches import TIMEOUT, Caches, digest
from tests.reference.model import Config, Picks, Stage
from tests.reference.scheduler import Batch, Chunk, News, Request, Scheduler


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Tensor-parallel ranks a stage, and the layers of every stage."""

    tp: int
    stages: tuple[range, ...]

    @property
    def world(self) -> int:
        return self.tp * len(self.stages)

    def ranks(self, stage: int) -> list[int]:
        return list(range(stage * self.tp, (stage + 1) * self.tp))


class Place:
    """Where this process stands, and its groups: one for the model's own collectives, one for KVPP."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rank = dist.get_rank()
        self.stage = self.rank // topology.tp
        self.tp_rank = self.rank % topology.tp
        self.layers = topology.stages[self.stage]
        self.first = self.stage == 0
        self.last = self.stage == len(topology.stages) - 1
        self._tp_group = self._new_group()
        ranks = topology.ranks(self.stage)
        self.transport: Transport = ProcessGroupTransport(self._new_group(), ranks)

    def _new_group(self) -> dist.ProcessGroup:
        limit = datetime.timedelta(seconds=TIMEOUT)
        stages = range(len(self.topology.stages))
        groups = [dist.new_group(self.topology.ranks(s), timeout=limit, backend="gloo") for s in stages]
        return groups[self.stage]

    def heads(self, count: int) -> slice:
        """The heads of this rank."""
        share = count // self.topology.tp
        return slice(self.tp_rank * share, (self.tp_rank + 1) * share)

    def gather(self, heads: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(heads) for _ in range(self.topology.tp)]
        dist.all_gather(parts, heads, self._tp_group)
        return torch.cat(parts, dim=1)

    def receive(self, batch: Batch, config: Config) -> tuple[torch.Tensor, Picks]:
        """Hidden states and picks from the stage before; the batch says how many."""
        x = torch.empty(sum(batch.sizes), config.hidden)
        widths = [min(config.topk, len(context)) for context in batch.contexts]
        picks = [
            torch.empty(size, width, dtype=torch.int64)
            for size, width in zip(batch.sizes, widths, strict=True)
        ]
        for tensor in (x, *picks):
            dist.recv(tensor, self.rank - self.topology.tp)
        return x, picks

    def send(self, x: torch.Tensor, picks: Picks) -> None:
        for tensor in (x, *picks):
            dist.send(tensor, self.rank + self.topology.tp)

    def tell(self, news: list[News]) -> list[News]:
        """What the last rank knows, on every rank."""
        box = [news]
        dist.broadcast_object_list(box, src=self.topology.world - 1)
        return box[0]


@dataclass(kw_only=True)
class Served:
    """What one rank has to show: every output of its stage, all tokens, and the bytes it keeps.

    `history[i]` is whether the forward of `outputs[i]` had history; `kept[n]` are the caches after forward
    `n`.
    """

    outputs: list[str] = field(default_factory=list)
    history: list[bool] = field(default_factory=list)
    finite: bool = True
    tokens: dict[str, list[int]] = field(default_factory=dict)
    kept: list[dict[str, str]] = field(default_factory=list)
    intact: bool = True
    seen: Counter[str] = field(default_factory=Counter)

    def note(self, output: torch.Tensor, batch: Batch) -> None:
        self.outputs.append(digest(output))
        self.history.append(batch.history)
        self.finite &= bool(output.isfinite().all())


def serve(
    place: Place,
    config: Config,
    caches: Caches,
    requests: Sequence[Request],
    scheduler: Scheduler,
    *,
    forwards: int,
) -> Served:
    """Run all requests to their end, or for `forwards` forwards."""
    stage = Stage(config, place.layers, heads=place.heads(config.heads), gather=place.gather)
    served = Served()
    for chunks in itertools.islice(iter(scheduler.schedule, []), forwards):
        batch = Batch(chunks)
        caches.begin(history=batch.history)
        x, picks = (stage.embed(batch.tokens), []) if place.first else place.receive(batch, config)
        x, picks = stage(x, batch, caches, picks)
        caches.end()
        news: list[News] = []
        if place.last:
            news = _sample_and_draft(stage, x, batch, caches, served)
        else:
            served.note(x, batch)
            place.send(x, picks)
        scheduler.update(chunks, place.tell(news))
        served.kept.append(caches.kept())
    served.tokens = {request.name: request.output for request in requests}
    served.intact, served.seen = caches.intact(), scheduler.seen
    return served


def _sample_and_draft(
    stage: Stage, x: torch.Tensor, batch: Batch, caches: Caches, served: Served
) -> list[News]:
    """Sample greedily, check the drafts of the last forward, and make those for the next one.

    The MTP layer runs over the tokens that turned out right, each with the token that follows it. A block
    that two requests share may so hold, at its end, what followed in the first one: a draft is a guess.
    """
    logits = stage.logits(x)
    served.note(logits, batch)
    sampled = [
        _sample(chunk, rows) for chunk, rows in zip(batch.chunks, logits.split(batch.sizes), strict=True)
    ]
    valid = [
        len(chunk.tokens) - (chunk.draft is not None and len(tokens) < 2)
        for chunk, tokens in zip(batch.chunks, sampled, strict=True)
    ]
    rights = [chunk.first(count) for chunk, count in zip(batch.chunks, valid, strict=True)]
    following = [
        token
        for chunk, tokens in zip(rights, sampled, strict=True)
        for token in (chunk.request.tokens + tokens)[chunk.start + 1 : chunk.end + 1]
    ]
    hidden = [rows[:count] for rows, count in zip(x.split(batch.sizes), valid, strict=True)]
    drafts = stage.draft_logits(torch.cat(hidden), following, Batch(rights), caches)
    served.note(drafts, batch)
    return [
        News(valid=n, tokens=tuple(tokens), draft=int(rows[-1].argmax()) if tokens else None)
        for n, tokens, rows in zip(valid, sampled, drafts.split(valid), strict=True)
    ]


def _sample(chunk: Chunk, logits: torch.Tensor) -> list[int]:
    """The tokens after this chunk: none within a prompt, two where the draft was right."""
    row = len(chunk.request.tokens) - 1 - chunk.start
    if row >= len(chunk.tokens):
        return []
    token = int(logits[row].argmax())
    return [token] if token != chunk.draft else [token, int(logits[row + 1].argmax())]

"""Who computes what in a forward: chunked prefill, prefix reuse, and blocks that are used again.

Every rank runs this same scheduler and is told the same tokens, so all ranks decide alike.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from tests.reference.caches import BLOCK


@dataclass(kw_only=True)
class Request:
    """`tokens` are the known ones, prompt and output; the caches hold the first `computed`."""

    name: str
    tokens: list[int]
    prompt: int
    wanted: int
    arrives: int
    computed: int = 0
    draft: int | None = None
    blocks: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt :][: self.wanted]

    @property
    def finished(self) -> bool:
        return len(self.output) == self.wanted


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one request, from position `start`; the last may be a draft."""

    request: Request
    start: int
    tokens: tuple[int, ...]
    draft: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def slots(self) -> list[int]:
        """Where each token of the request lies, from position 0 to the end of this chunk."""
        blocks = self.request.blocks
        return [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(self.end)]

    def first(self, count: int) -> "Chunk":
        """The first `count` tokens of this chunk."""
        return replace(self, tokens=self.tokens[:count], draft=None)


class Batch:
    """The chunks of one forward as tensors; row `i` is one token."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = tuple(chunks)
        self.sizes = [len(chunk.tokens) for chunk in chunks]
        self.tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        self.positions = [torch.arange(chunk.start, chunk.end) for chunk in chunks]
        self.contexts = [torch.tensor(chunk.slots) for chunk in chunks]
        self.slots = torch.cat([c[-size:] for c, size in zip(self.contexts, self.sizes, strict=True)])

    @property
    def history(self) -> bool:
        """Whether any request of the batch has computed tokens."""
        return any(chunk.start > 0 for chunk in self.chunks)


class BlockPool:
    """Blocks and their users. A free block keeps its bytes, and its prefix, until it is taken again."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        self._users = Counter[int]()
        self._used: set[int] = set()
        self._prefixes: dict[tuple[int, ...], int] = {}
        self._fresh: set[int] = set()
        self.seen = Counter[str]()

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        block = self._free.pop(0)
        self._prefixes = {p: b for p, b in self._prefixes.items() if b != block}
        self.seen["blocks with old bytes"] += block in self._used
        self._used.add(block)
        self._users[block] = 1
        return block

    def begin_forward(self) -> None:
        self._fresh.clear()

    def share(self, block: int) -> None:
        if block in self._fresh:
            self.seen["shared blocks that the same forward fills"] += 1
        elif block in self._free:
            self.seen["shared blocks of ended requests"] += 1
        else:
            self.seen["shared blocks of running requests"] += 1
        if block in self._free:
            self._free.remove(block)
        self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def remember(self, request: Request, computed: int) -> None:
        """Let later requests find the blocks of `request` that its first `computed` tokens fill."""
        for i in range(min(computed, len(request.tokens)) // BLOCK):
            prefix = tuple(request.tokens[: BLOCK * (i + 1)])
            if prefix not in self._prefixes:
                self._prefixes[prefix] = request.blocks[i]
                self._fresh.add(request.blocks[i])

    def known(self, prompt: Sequence[int]) -> list[int]:
        """Blocks that hold the head of `prompt` already; its last token is always left to compute."""
        blocks: list[int] = []
        for stop in range(BLOCK, len(prompt), BLOCK):
            block = self._prefixes.get(tuple(prompt[:stop]))
            if block is None:
                break
            blocks.append(block)
        return blocks


class Scheduler:
    """At most `budget` tokens a forward, prompts before outputs; `seen` counts what has happened."""

    def __init__(self, requests: Sequence[Request], num_blocks: int, budget: int) -> None:
        self._waiting = list(requests)
        self._running: list[Request] = []
        self._pool = BlockPool(num_blocks)
        self._budget = budget
        self._step = 0
        self.seen = self._pool.seen

    def schedule(self) -> list[Chunk]:
        """The chunks of the next forward; none when all requests have ended."""
        while self._waiting or self._running:
            self._step += 1
            self._pool.begin_forward()
            left, chunks = self._budget, []
            for request in self._candidates():
                chunks.append(self._chunk(request, left))
                self._pool.remember(request, chunks[-1].end)
                left -= len(chunks[-1].tokens)
                if left == 0:
                    break
            if chunks:
                self._count(chunks)
                return chunks
        return []

    def _candidates(self) -> Iterator[Request]:
        """Begun prompts, new requests, then outputs. A request is admitted after the ones before it have
        their chunks, so that it can share blocks which only this forward will fill.
        """
        running = list(self._running)
        yield from (request for request in running if request.computed < request.prompt)
        while self._waiting and self._waiting[0].arrives < self._step and self._admit():
            yield self._running[-1]
        yield from (request for request in running if request.computed >= request.prompt)

    def update(self, chunks: Sequence[Chunk], news: Sequence["News"]) -> None:
        """Take what the forward over `chunks` has brought."""
        for chunk, new in zip(chunks, news, strict=True):
            request = chunk.request
            request.computed = chunk.start + new.valid
            request.tokens += new.tokens
            request.draft = new.draft
            if chunk.draft is not None:
                accepted = new.valid == len(chunk.tokens)
                self.seen["accepted drafts" if accepted else "rejected drafts"] += 1
            if request.finished:
                self._running.remove(request)
                self._pool.give_back(request.blocks)

    def _admit(self) -> bool:
        """Give the next request its blocks, if there are enough."""
        request = self._waiting[0]
        shared = self._pool.known(request.tokens)
        needed = -(-(request.prompt + request.wanted + 1) // BLOCK)
        if len(self._pool) < needed:
            return False
        for block in shared:
            self._pool.share(block)
        request.blocks = shared + [self._pool.take() for _ in range(needed - len(shared))]
        request.computed = BLOCK * len(shared)
        self._running.append(self._waiting.pop(0))
        return True

    def _chunk(self, request: Request, left: int) -> Chunk:
        draft = [] if request.draft is None or left < 2 else [request.draft]
        tokens = (request.tokens[request.computed :] + draft)[:left]
        return Chunk(
            request=request,
            start=request.computed,
            tokens=tuple(tokens),
            draft=draft[0] if draft else None,
        )

    def _count(self, chunks: Sequence[Chunk]) -> None:
        history = any(chunk.start > 0 for chunk in chunks)
        self.seen["forwards with history" if history else "forwards without history"] += 1
        others = any(r.computed > 0 for r in self._running)
        self.seen["forwards without history while others have some"] += others and not history
        prompts = [chunk.start < chunk.request.prompt for chunk in chunks]
        self.seen["forwards with prompts and outputs"] += any(prompts) and not all(prompts)
        self.seen["split prompts"] += sum(chunk.end < chunk.request.prompt for chunk in chunks)


@dataclass(frozen=True, kw_only=True)
class News:
    """What a forward brought a chunk: how many of its tokens were right, new ones, the next draft."""

    valid: int
    tokens: tuple[int, ...]
    draft: int | None

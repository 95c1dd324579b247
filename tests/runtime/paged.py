"""A deterministic engine whose requests own scattered blocks, for payloads that send only what is used."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpp_dag.graph import Policy
from kvpp_dag.plan import plan_stage
from kvpp_dag.runtime import (
    Arena,
    Costs,
    CpuStream,
    ForwardPass,
    HostStream,
    Observer,
    Payload,
    Transport,
)
from tests.runtime_support import GuardedMemory, as_bytes, repeated, small_specs

NUM_BLOCKS = 40
POISON = 0xFF

WAYS = {
    "runs": Costs(start=0.0, run=0.0, send=1.0, copy_start=1.0, copy=1.0),
    "packed": Costs(start=1.0, run=1.0, send=0.0, copy_start=0.0, copy=0.0),
}
"""Costs with which payload active takes one way whenever blocks are scattered."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward: blocks with history, and blocks that are written."""

    used: list[int]
    fresh: list[int]


def make_steps(seed: int, count: int) -> list[Step]:
    """Steps of requests that come, grow by a block at a time, sit out some steps, and go."""
    dice = random.Random(seed)
    free = list(range(NUM_BLOCKS))
    dice.shuffle(free)
    requests: list[list[int]] = []
    steps = []
    while len(steps) < count:
        if len(free) < 6 and requests:
            free += requests.pop(dice.randrange(len(requests)))
            continue
        if not requests or dice.random() < 0.3:
            requests.append([])
        running = dice.sample(requests, dice.randint(1, len(requests)))
        used = sorted(block for request in running for block in request)
        fresh = [free.pop(dice.randrange(len(free))) for _ in running[:5]]
        for request, block in zip(running, fresh, strict=False):
            request.append(block)
        steps.append(Step(used=used, fresh=sorted(fresh)))
    return steps


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a rank computed and holds, and what it sent."""

    outputs: list[str]
    owned: dict[int, bytes]
    guards_intact: bool
    bytes_sent: int
    broadcasts_sent: int
    fresh_seen: set[int]
    """Bytes that a receiver found in fresh blocks of forwards with history, before it wrote them."""


def run_steps(
    transport: Transport,
    layers: int,
    steps: Sequence[Step],
    *,
    payload: Payload = Payload.ACTIVE,
    costs: Costs | None = None,
    policy: Policy = Policy.ON_ACQUIRE,
    depth: int = 1,
    forget: int | None = None,
    fail: tuple[int, int, int] | None = None,
    observer: Observer | None = None,
    skip_broadcasts: bool = False,
) -> Result:
    """Run `steps`; slots and staging are poisoned before each.

    `forget` leaves that place of the used blocks out of what the forward is told, as a control. `fail` is a
    rank, step and layer whose compute raises; every rank then repeats the step.
    """
    plan = plan_stage(small_specs(layers), ranks=transport.size, depth=depth, staging=True)
    memory = GuardedMemory(transport)
    arena = Arena(plan, rank=transport.rank, num_blocks=NUM_BLOCKS, allocate=memory)
    forward = ForwardPass(
        arena=arena,
        transport=transport,
        compute=HostStream("compute", timeout=20.0),
        transfer=CpuStream("transfer", timeout=20.0),
        copy=CpuStream("copy", timeout=20.0),
        payload=payload,
        costs=costs,
        policy=policy,
        observer=observer,
        timeout=20.0,
        skip_broadcasts=skip_broadcasts,
        compare_blocks=True,
    )
    outputs: list[str] = []
    seen: set[int] = set()
    for token, step in enumerate(steps):
        if fail is not None and fail[1] == token:
            try:
                fail_at = fail[2] if fail[0] == arena.rank else None
                _run(forward, arena, token, step, forget, fail_at, seen)
            except ArithmeticError as error:
                forward.abort(error)
        outputs.append(_run(forward, arena, token, step, forget, None, seen))
    return Result(
        outputs=outputs,
        owned={b.ordinal: as_bytes(arena.cache(b.ordinal)) for b in plan.owned(arena.rank)},
        guards_intact=memory.guards_intact(),
        bytes_sent=forward.bytes_sent,
        broadcasts_sent=forward.broadcasts_sent,
        fresh_seen=seen,
    )


def _run(
    forward: ForwardPass,
    arena: Arena,
    token: int,
    step: Step,
    forget: int | None,
    fail_at: int | None,
    seen: set[int],
) -> str:
    _poison(arena)
    told = torch.tensor(step.used, dtype=torch.int64).numpy()
    if forget is not None and len(told) > 1:
        told = torch.cat([torch.tensor(told[:forget]), torch.tensor(told[forget + 1 :])]).numpy()
    fresh = list(step.fresh)
    forward.begin(history=bool(step.used), used=told, fresh=fresh)
    told[:] = 0  # the caller's lists change right after begin returns
    fresh[:] = []
    x = str(token).encode()
    for bundle in arena.plan.bundles:
        forward.acquire(bundle.ordinal)
        if bundle.ordinal == fail_at:
            raise ArithmeticError(f"compute {bundle.ordinal} fell over")
        views = [arena.component(bundle.ordinal, c.name) for c in bundle.spec.components]
        if step.used and arena.plan.owners[bundle.ordinal] != arena.rank:
            for view in views:
                seen.update(view[step.fresh].unique().tolist())
        history = b"".join(as_bytes(view[step.used]) for view in views)
        x = hashlib.sha256(x + history).digest()
        for view in views:
            for block in step.fresh:
                view[block] = repeated(x, view.shape[1])
        forward.release(bundle.ordinal)
    forward.end()
    return x.hex()


def _poison(arena: Arena) -> None:
    for ordinal, owner in enumerate(arena.plan.owners):
        if owner != arena.rank:
            arena.cache(ordinal).fill_(POISON)
    if arena.plan.staging:
        for half in range(2):
            arena.staging(half).fill_(POISON)

"""What ranks do in the runtime tests: functions `work(transport, ...)` for threads and processes."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from kvpp_dag.errors import DivergenceError, TransferError
from kvpp_dag.graph import Policy
from kvpp_dag.runtime import Arena, ProcessGroupTransport, Transport, process_group
from kvpp_dag.trace import ForwardRecord, Recorder
from tests.runtime_support import SENTINEL, Engine, GuardedMemory, as_bytes, make_engine, small_plan


def nan_payloads(dtype: torch.dtype) -> torch.Tensor:
    """Values of `dtype` that hold every byte, NaNs with payloads among them."""
    content = torch.arange(256, dtype=torch.uint8).repeat(4)
    if dtype == torch.float32:
        content[3:512:4] = 0x7F  # quiet and signalling NaNs, little-endian
        content[2:512:4] |= 0x80
    return content.view(dtype)


def exchange(transport: Transport, dtype: torch.dtype, *, send: bool = True) -> bytes:
    """Rank 0 owns the payload; every rank returns the bytes that it then holds."""
    payload = nan_payloads(dtype)
    storage = GuardedMemory(transport)(payload.nbytes + 32)
    view = storage[16:-16].view(dtype)  # contiguous, at an offset
    if transport.rank == 0:
        view.copy_(payload)
        view.view(torch.uint8).copy_(payload.view(torch.uint8))
    if send:
        transport.prepare(view, 0)()
    assert bool((storage[:16] == SENTINEL).all() and (storage[-16:] == SENTINEL).all())
    return as_bytes(view)


def exchange_in_pieces(transport: Transport, largest: int) -> bytes:
    """As `exchange`, in several pieces a broadcast."""
    process_group.piece_bounds = partial(process_group.piece_bounds, largest=largest)
    return exchange(transport, torch.uint8)


def exchange_over_groups(transport: ProcessGroupTransport, groups: int, large: int) -> bytes:
    """As `exchange`, over as many `groups`, which serve broadcasts from `large` bytes on."""
    process_group.LARGE = large
    more = [dist.new_group(list(transport.ranks), backend="gloo") for _ in range(groups - 1)]
    spread = ProcessGroupTransport(transport.group, transport.ranks, more_groups=more)
    spread.agree(b"same")
    return exchange(spread, torch.uint8)


def agree(transport: Transport, tokens: Sequence[bytes]) -> None:
    """Every rank comes with its own token."""
    transport.agree(tokens[transport.rank])


@dataclass
class Served:
    """What one rank has to show after some forwards."""

    outputs: list[str]
    owned: dict[int, bytes]
    guards_intact: bool
    drafts_intact: bool
    slack_intact: bool


def serve(
    transport: Transport,
    layers: int,
    blocks: Sequence[int],
    *,
    policy: Policy = Policy.ON_ACQUIRE,
    depth: int = 1,
    skip_broadcasts: bool = False,
    poison: int = 0xEE,
    fail: dict[int, tuple[int, int]] | None = None,
) -> Served:
    """Run one forward per item of `blocks`.

    Before each, whatever a rank receives into is filled with `poison`, so that nothing survives there.
    `fail[rank] = (forward, layer)` makes that rank's forward raise there; every rank then repeats it.
    """
    plan = small_plan(layers, transport.size, depth)
    memory = GuardedMemory(transport)
    engine = make_engine(plan, transport, memory=memory, policy=policy, skip_broadcasts=skip_broadcasts)
    received = [i for i in range(layers) if plan.owners[i] != transport.rank]
    fail = fail or {}
    repeated = {forward for forward, _ in fail.values()}
    outputs = []
    for token, block in enumerate(blocks):
        for ordinal in received:
            engine.arena.cache(ordinal).fill_(poison)
        if token in repeated:
            forward, layer = fail.get(transport.rank, (-1, -1))
            try:
                engine.run(token, block, fail_at=layer if forward == token else None)
            except ArithmeticError as error:
                engine.forward.abort(error)
        outputs.append(engine.run(token, block))
    return Served(
        outputs=outputs,
        owned=engine.owned_bytes(),
        guards_intact=memory.guards_intact(),
        drafts_intact=bool((engine.arena.draft("mtp.0.attn", "main") == SENTINEL).all()),
        slack_intact=_slack_intact(engine.arena),
    )


def _slack_intact(arena: Arena) -> bool:
    """Whether the bytes of each slot past the largest bundle that it receives are untouched."""
    plan = arena.plan
    for slot in range(plan.slots):
        ordinals = range(slot, len(plan.bundles), plan.slots)
        used = max((arena.cache(i).numel() for i in ordinals if plan.owners[i] != arena.rank), default=0)
        if not bool((arena.scratch(slot)[used:] == SENTINEL).all()):
            return False
    return True


def record(
    transport: Transport, layers: int, blocks: Sequence[int], policy: Policy, keep: int = 64
) -> list[ForwardRecord]:
    """What a recorder kept of one forward per item of `blocks`."""
    recorder = Recorder(keep=keep)
    plan = small_plan(layers, transport.size)
    engine = make_engine(plan, transport, policy=policy, observer=recorder)
    for token, block in enumerate(blocks):
        engine.run(token, block)
    return list(recorder.forwards)


def disagree_on_history(transport: Transport) -> tuple[str, str]:
    """Rank 0 has history, rank 1 has not and goes on to a forward with history."""
    engine = make_engine(small_plan(4, transport.size), transport)
    engine.run(0, 0)
    if transport.rank == 1:
        engine.run(1, 0)
    return _failure(engine)


def disagree_on_history_and_stop(transport: Transport) -> tuple[str, str] | str:
    """Rank 0 has history, rank 1 has not and begins no other forward."""
    engine = make_engine(small_plan(4, transport.size), transport)
    engine.run(0, 0)
    if transport.rank == 1:
        return engine.run(1, 0)
    return _failure(engine)


def disagree_on_layout(transport: Transport) -> tuple[str, str]:
    """Equal bytes, another order of owners: ranks planned another depth."""
    return _failure(make_engine(small_plan(4, transport.size, depth=1 + transport.rank), transport))


def die(transport: Transport, layer: int, dying: int = 1) -> tuple[str, str, float]:
    """Rank `dying` dies in its second forward, at `layer`."""
    engine = make_engine(small_plan(5, transport.size), transport)
    engine.run(0, 0)
    started = time.monotonic()
    try:
        engine.run(1, 1, fail_at=layer if transport.rank == dying else None)
        engine.run(2, 2)  # what the second forward needs may have arrived before that death
    except ArithmeticError:
        os._exit(3)
    except TransferError as error:
        return (*_after_abort(engine, error), time.monotonic() - started)
    raise AssertionError("nobody noticed")


def _failure(engine: Engine) -> tuple[str, str]:
    """Run a forward that must fail in its transfer; the error, and the next `begin`'s error."""
    try:
        engine.run(9, 1)
    except TransferError as error:
        return _after_abort(engine, error)
    raise AssertionError("the forward went through")


def _after_abort(engine: Engine, error: TransferError) -> tuple[str, str]:
    engine.forward.abort(error)
    assert not engine.forward.active
    kind = "diverged" if isinstance(error, DivergenceError) else "failed"
    try:
        engine.forward.begin(history=False)
    except TransferError as later:
        return f"{kind}: {error}", str(later)
    raise AssertionError("the next begin went through")

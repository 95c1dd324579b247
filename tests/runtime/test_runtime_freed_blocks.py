"""Blocks freed while a forward reads them (case 18): an engine may wipe a block once `abort` has returned."""

from functools import partial

import pytest

from kvpp_dag.runtime import Transport
from tests.runtime_support import make_engine, reference, run_group, small_plan

LAYERS, RANKS, BLOCKS = 6, 2, (0, 1, 2)


def serve_and_wipe(transport: Transport, *, fail_at: int, early: bool) -> str | None:
    """Rank 0 gives up its last forward at layer `fail_at`, and its engine wipes a block that peers still
    need: after `abort`, or, if `early`, before it. The others go on, and return their last output.
    """
    engine = make_engine(small_plan(LAYERS, transport.size), transport)
    outputs = [engine.run(token, block) for token, block in enumerate(BLOCKS[:-1])]
    last = len(outputs)
    if transport.rank != 0:
        return engine.run(last, BLOCKS[-1])
    try:
        engine.run(last, BLOCKS[-1], fail_at=fail_at)
    except ArithmeticError as error:
        if early:
            wipe(engine, block=0)
        engine.forward.abort(error)
        wipe(engine, block=0)
    return None


def wipe(engine, block: int) -> None:
    plan, arena = engine.forward.plan, engine.arena
    for bundle in plan.owned(arena.rank):
        for component in bundle.spec.components:
            arena.component(bundle.ordinal, component.name)[block] = 0


@pytest.mark.parametrize("kind", ["local", "gloo"])
@pytest.mark.parametrize("fail_at", [0, 1, LAYERS - 1])
def test_a_block_wiped_after_abort_was_sent_whole(kind, fail_at):
    _, output = run_group(kind, RANKS, partial(serve_and_wipe, fail_at=fail_at, early=False))
    assert output == reference(LAYERS, BLOCKS)[0][-1]


@pytest.mark.parametrize("kind", ["local", "gloo"])
def test_a_block_wiped_before_abort_is_seen_by_the_peers(kind):
    """The control: layer 2 belongs to rank 0 and is sent by the abort."""
    _, output = run_group(kind, RANKS, partial(serve_and_wipe, fail_at=0, early=True))
    assert output != reference(LAYERS, BLOCKS)[0][-1]

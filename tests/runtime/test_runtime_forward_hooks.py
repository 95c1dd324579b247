"""The hooks of one rank: order, coverage and re-entry."""

import itertools

import pytest

from kvpp_dag.errors import (
    CoverageError,
    OrderError,
    ReentryError,
)
from tests.runtime.forward_support import LAYERS, PREFIXES, call, go_through

ALLOWED = {
    "idle": {"b"},
    "begun": {"a0"},
    "layer 0 held": {"a0", "r0"},
    "layer 0 released": {"a1"},
    "all released": {"e"},
    "ended": {"b"},
}
HOOKS = ["b", "e", *(f"{hook}{layer}" for hook in "ar" for layer in (-1, 0, 1, 2, 3, 4))]


def expected_error(state, hook):
    if hook == "b":
        return ReentryError
    if hook == "e" and state not in ("idle", "ended"):
        return CoverageError
    return OrderError


@pytest.mark.parametrize(("state", "hook"), list(itertools.product(PREFIXES, HOOKS)))
def test_every_hook_in_every_state(state, hook, kvpp, transport):
    """What is out of turn is a typed error, and the forward goes on as if it had not been called."""
    done = PREFIXES[state].split()
    for earlier in done:
        call(kvpp, earlier)
    rest = [h for h in PREFIXES["ended"].split() if h not in done] or PREFIXES["ended"].split()
    if hook in ALLOWED[state]:
        call(kvpp, hook)
        rest = [h for h in rest if h != hook]
    else:
        with pytest.raises(expected_error(state, hook)):
            call(kvpp, hook)
    for later in rest:
        call(kvpp, later)
    assert not kvpp.active
    assert transport.calls == ["agree", *range(LAYERS)] * kvpp.forwards


def test_out_of_turn_messages_say_what_was_expected(kvpp):
    with pytest.raises(OrderError, match=r"acquire\(0\) out of turn: no forward is in flight"):
        kvpp.acquire(0)
    kvpp.begin(history=True)
    with pytest.raises(OrderError, match=r"acquire\(2\) out of turn: layer 0 is next"):
        kvpp.acquire(2)
    kvpp.acquire(0)
    with pytest.raises(OrderError, match=r"release\(1\) out of turn: layer 0 is held"):
        kvpp.release(1)


def test_a_layer_that_never_called_the_hook_is_named_at_the_end(kvpp):
    kvpp.begin(history=True)
    kvpp.acquire(0)
    kvpp.release(0)
    with pytest.raises(CoverageError, match=r"'layers\.1\.attn' never acquired .*3 of 4 layers"):
        kvpp.end()
    kvpp.acquire(1)
    with pytest.raises(CoverageError, match=r"'layers\.1\.attn' was acquired but not released"):
        kvpp.end()
    kvpp.abort()
    go_through(kvpp)


def test_a_second_begin_is_an_error_and_keeps_the_pending_work_of_the_first(kvpp, transport):
    transport.gate.clear()
    kvpp.begin(history=True)
    for history in (True, False):
        with pytest.raises(ReentryError, match="Forward 1 of rank 0 is still in flight"):
            kvpp.begin(history=history)
    assert kvpp.forwards == 1
    assert kvpp.active
    transport.gate.set()
    for layer in range(LAYERS):
        kvpp.acquire(layer)
        kvpp.release(layer)
    kvpp.end()
    assert transport.calls == ["agree", *range(LAYERS)]

"""The hooks of one rank: order, coverage, re-entry, failures, and what is sent when."""

import itertools
import threading
from dataclasses import replace

import pytest
import torch

from kvpp_dag.errors import (
    ConfigError,
    CoverageError,
    DivergenceError,
    OrderError,
    ReentryError,
    TransferError,
    UnsoundGraphError,
)
from kvpp_dag.graph import Policy
from kvpp_dag.plan import plan_stage
from kvpp_dag.runtime import (
    Arena,
    CpuStream,
    ForwardPass,
    HostStream,
    LocalGroup,
    ManualStream,
    compile,
    compile_forwards,
)
from tests.runtime_support import NUM_BLOCKS, make_engine, small_plan, small_specs

LAYERS = 4
SOON = 20.0


class Alone:
    """A transport without peers: counts, and fails or dawdles where told to."""

    def __init__(self, rank=0, size=2):
        self.rank, self.size = rank, size
        self.calls = []
        self.prepared = 0
        self.error_at = {}
        self.gate = threading.Event()
        self.gate.set()

    def agree(self, token):
        self._call("agree")

    def prepare(self, view, owner):
        name = self.prepared
        self.prepared += 1
        return lambda: self._call(name)

    def _call(self, name):
        self.gate.wait(SOON)
        self.calls.append(name)
        if name in self.error_at:
            raise self.error_at[name]


@pytest.fixture
def transport():
    transport = Alone()
    yield transport
    transport.gate.set()


@pytest.fixture
def kvpp(transport):
    return make_engine(small_plan(LAYERS, 2), transport).forward


def go_through(kvpp, *, history=True, layers=LAYERS):
    kvpp.begin(history=history)
    for layer in range(layers):
        kvpp.acquire(layer)
        kvpp.release(layer)
    kvpp.end()


@pytest.mark.parametrize("policy", list(Policy))
def test_a_forward_with_history_agrees_and_then_sends_every_layer_once_in_order(policy, transport):
    kvpp = make_engine(small_plan(LAYERS, 2), transport, policy=policy).forward
    for _ in range(3):
        transport.calls.clear()
        go_through(kvpp)
        assert transport.calls == ["agree", *range(LAYERS)]
    assert (kvpp.forwards, kvpp.forwards_with_history) == (3, 3)


def test_a_forward_without_history_sends_nothing(kvpp, transport):
    go_through(kvpp, history=False)
    go_through(kvpp, history=False)
    assert transport.calls == []
    assert (kvpp.forwards, kvpp.forwards_with_history) == (2, 0)


def test_a_group_of_one_sends_nothing():
    transport = Alone(size=1)
    kvpp = make_engine(small_plan(LAYERS, 1), transport).forward
    go_through(kvpp)
    assert transport.calls == []
    assert (kvpp.broadcasts_per_forward, kvpp.bytes_per_forward) == (0, 0)


def test_an_empty_stage_goes_through():
    for history in (True, False):
        go_through(make_engine(small_plan(0, 2), Alone()).forward, history=history, layers=0)


def test_figures_per_forward(kvpp):
    bundles = kvpp.plan.bundles
    assert kvpp.broadcasts_per_forward == LAYERS
    assert kvpp.bytes_per_forward == sum(b.bytes_per_block for b in bundles) * NUM_BLOCKS
    control = make_engine(small_plan(LAYERS, 2), Alone(), skip_broadcasts=True).forward
    assert (control.broadcasts_per_forward, control.bytes_per_forward) == (0, 0)


def test_skipped_broadcasts_neither_agree_nor_send(transport):
    kvpp = make_engine(small_plan(LAYERS, 2), transport, skip_broadcasts=True).forward
    go_through(kvpp)
    assert transport.calls == []


@pytest.mark.parametrize(
    ("policy", "started"), [(Policy.ON_ACQUIRE, [1, 2, 3, 4, 4]), (Policy.ON_RELEASE, [2, 3, 4, 4])]
)
def test_how_far_transfers_run_ahead_of_the_layers(policy, started, transport):
    kvpp = make_engine(small_plan(LAYERS, 2), transport, policy=policy).forward
    seen = []

    def look():
        kvpp._transfer.synchronize(SOON)
        seen.append(len(transport.calls) - 1)

    kvpp.begin(history=True)
    look()
    for layer in range(LAYERS):
        kvpp.acquire(layer)
        if policy is Policy.ON_ACQUIRE:
            look()
        kvpp.release(layer)
        if policy is Policy.ON_RELEASE and layer < LAYERS - 1:
            look()
    assert seen == started


def test_acquire_returns_only_when_the_layer_has_arrived(kvpp, transport):
    transport.gate.clear()
    acquired = threading.Event()

    def engine():
        kvpp.begin(history=True)
        kvpp.acquire(0)
        acquired.set()

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    assert not acquired.wait(0.2)
    transport.gate.set()
    assert acquired.wait(SOON)
    thread.join(SOON)
    assert transport.calls[:2] == ["agree", 0]


def test_acquiring_a_held_layer_again_changes_nothing(kvpp, transport):
    kvpp.begin(history=True)
    for layer in range(LAYERS):
        for _ in range(3):
            kvpp.acquire(layer)
        kvpp.release(layer)
    kvpp.end()
    assert transport.calls == ["agree", *range(LAYERS)]


PREFIXES = {
    "idle": "",
    "begun": "b",
    "layer 0 held": "b a0",
    "layer 0 released": "b a0 r0",
    "all released": "b a0 r0 a1 r1 a2 r2 a3 r3",
    "ended": "b a0 r0 a1 r1 a2 r2 a3 r3 e",
}
ALLOWED = {
    "idle": {"b"},
    "begun": {"a0"},
    "layer 0 held": {"a0", "r0"},
    "layer 0 released": {"a1"},
    "all released": {"e"},
    "ended": {"b"},
}
HOOKS = ["b", "e", *(f"{hook}{layer}" for hook in "ar" for layer in (-1, 0, 1, 2, 3, 4))]


def call(kvpp, hook):
    match hook[0]:
        case "b":
            kvpp.begin(history=True)
        case "e":
            kvpp.end()
        case "a":
            kvpp.acquire(int(hook[1:]))
        case "r":
            kvpp.release(int(hook[1:]))


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


@pytest.mark.parametrize("done", range(1 + 2 * LAYERS + 1))
@pytest.mark.parametrize("policy", list(Policy))
def test_abort_sends_what_is_left_and_the_next_forward_is_whole(policy, done, transport):
    """Wherever the forward stops, peers that go on get every transfer once, in order."""
    kvpp = make_engine(small_plan(LAYERS, 2), transport, policy=policy).forward
    for hook in PREFIXES["all released"].split()[:done]:
        call(kvpp, hook)
    kvpp.abort(ArithmeticError("compute fell over"))
    assert not kvpp.active
    assert transport.calls == (["agree", *range(LAYERS)] if done else [])
    transport.calls.clear()
    go_through(kvpp)
    assert transport.calls == ["agree", *range(LAYERS)]


def test_abort_waits_until_the_transfers_have_ended(kvpp, transport):
    transport.gate.clear()
    kvpp.begin(history=True)
    threading.Timer(0.2, transport.gate.set).start()
    kvpp.abort()
    assert transport.calls == ["agree", *range(LAYERS)]


def test_abort_does_nothing_between_forwards(kvpp, transport):
    kvpp.abort()
    go_through(kvpp)
    kvpp.abort()
    go_through(kvpp)
    assert transport.calls == ["agree", *range(LAYERS)] * 2


@pytest.mark.parametrize("failing", range(LAYERS))
def test_a_failed_transfer_names_the_layer_that_waited_and_closes_the_group(failing, kvpp, transport):
    transport.error_at = {failing: DivergenceError("Somebody diverged.")}
    kvpp.begin(history=True)
    for layer in range(failing):
        kvpp.acquire(layer)
        kvpp.release(layer)
    with pytest.raises(DivergenceError, match=rf"layer {failing} \(layers\.{failing}\.attn\) waited"):
        kvpp.acquire(failing)
    kvpp.abort()
    assert transport.calls == ["agree", *range(failing + 1)]  # nothing is sent after a failure
    assert not kvpp.active
    for _ in range(2):
        with pytest.raises(TransferError, match="unusable since forward 1 failed: Somebody diverged"):
            kvpp.begin(history=False)
    assert not kvpp.active
    assert kvpp.forwards == 1


def test_after_a_failed_acquire_nothing_but_abort_is_accepted(kvpp, transport):
    """Above all, a second try must not return as if the layer had arrived."""
    transport.error_at = {1: TransferError("The link broke.")}
    kvpp.begin(history=True)
    kvpp.acquire(0)
    kvpp.release(0)
    with pytest.raises(TransferError):
        kvpp.acquire(1)
    for _ in range(3):
        with pytest.raises(OrderError, match="forward 1 has failed and must be aborted"):
            kvpp.acquire(1)
    with pytest.raises(OrderError):
        kvpp.release(1)
    with pytest.raises(CoverageError):
        kvpp.end()
    with pytest.raises(ReentryError):
        kvpp.begin(history=True)
    kvpp.abort()
    assert not kvpp.active


def test_what_is_no_transfer_error_comes_through_as_it_is(kvpp, transport):
    transport.error_at = {0: ZeroDivisionError("a bug")}
    kvpp.begin(history=True)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        kvpp.acquire(0)
    kvpp.abort()
    with pytest.raises(TransferError, match="a bug"):
        kvpp.begin(history=True)


class Impatient(HostStream):
    """A compute stream whose waits time out at once, until told otherwise."""

    patience = 0.1

    def wait(self, event):
        event.synchronize(self.patience)


def impatient(transport, abort_within):
    arena = Arena(small_plan(LAYERS, 2), rank=0, num_blocks=NUM_BLOCKS)
    return ForwardPass(
        arena=arena,
        transport=transport,
        compute=Impatient("compute", timeout=SOON),
        transfer=CpuStream("transfer", timeout=SOON),
        timeout=abort_within,
    )


def test_a_transfer_that_hangs_is_an_error_within_the_timeout_and_so_is_its_abort(transport):
    kvpp = impatient(transport, 0.1)
    transport.gate.clear()
    kvpp.begin(history=True)
    with pytest.raises(TransferError, match=r"completion\[0\] was not reached within 0\.1 s"):
        kvpp.acquire(0)
    kvpp.abort()
    with pytest.raises(TransferError, match="unusable since forward 1"):
        kvpp.begin(history=True)


def test_a_transfer_that_was_only_slow_can_be_aborted_and_repeated(transport, monkeypatch):
    kvpp = impatient(transport, SOON)
    transport.gate.clear()
    kvpp.begin(history=True)
    with pytest.raises(TransferError):
        kvpp.acquire(0)
    transport.gate.set()
    kvpp.abort()
    monkeypatch.setattr(Impatient, "patience", SOON)
    go_through(kvpp)
    assert transport.calls == ["agree", *range(LAYERS)] * 2


def test_a_third_forward_waits_until_the_first_has_ended_on_an_asynchronous_compute_stream():
    arena = Arena(small_plan(LAYERS, 2), rank=0, num_blocks=NUM_BLOCKS)
    compute, transfer = ManualStream("compute"), ManualStream("transfer")
    kvpp = ForwardPass(arena=arena, transport=Alone(), compute=compute, transfer=transfer, timeout=0.05)
    go_through(kvpp)
    go_through(kvpp)
    with pytest.raises(TransferError, match="end of an earlier forward was not reached"):
        kvpp.begin(history=True)
    assert not kvpp.active
    while compute.step() or transfer.step():
        pass
    go_through(kvpp)


def test_a_host_that_runs_ahead_of_its_compute_stream(transport):
    arena = Arena(small_plan(LAYERS, 2), rank=0, num_blocks=NUM_BLOCKS)
    streams = {name: CpuStream(name, timeout=SOON) for name in ("compute", "transfer")}
    kvpp = ForwardPass(arena=arena, transport=transport, timeout=SOON, **streams)
    for _ in range(20):
        go_through(kvpp)
    for stream in streams.values():
        stream.synchronize(SOON)
    assert transport.calls == ["agree", *range(LAYERS)] * 20


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3), (0, 1)])
def test_arena_and_transport_must_be_those_of_one_rank(rank, size):
    arena = Arena(small_plan(LAYERS, 2), rank=0, num_blocks=NUM_BLOCKS)
    streams = {name: HostStream(name, timeout=SOON) for name in ("compute", "transfer")}
    with pytest.raises(ConfigError, match=f"rank 0 of 2, .* rank {rank} of {size}"):
        ForwardPass(arena=arena, transport=Alone(rank, size), **streams)


@pytest.mark.parametrize("policy", list(Policy))
def test_compiled_forwards_are_equal_in_what_they_send(policy):
    graphs = [compile_forwards(small_plan(5, 3), rank, NUM_BLOCKS, policy) for rank in range(3)]
    sent = [[(n.id, n.owner, n.bytes) for n in with_history.broadcasts] for _, with_history in graphs]
    assert sent[0] == sent[1] == sent[2]
    assert len(sent[0]) == 5
    assert all(not without.broadcasts for without, _ in graphs)


def test_an_unsound_graph_is_refused_before_anything_runs(monkeypatch):
    """A builder that forgets the last reader of a slot, on a stream of its own."""

    def careless(*args, **options):
        graph = build(*args, **options)
        nodes = [replace(n, after=(), stream="other") if n.id == "ready[2]" else n for n in graph.nodes]
        return replace(graph, nodes=tuple(nodes))

    build = compile.build_forward
    compile_forwards(small_plan(7, 2), 1, NUM_BLOCKS, Policy.ON_ACQUIRE)
    monkeypatch.setattr(compile, "build_forward", careless)
    with pytest.raises(UnsoundGraphError, match="race on scratch"):
        compile_forwards(small_plan(7, 2), 1, NUM_BLOCKS, Policy.ON_ACQUIRE)


def test_transfers_are_prepared_once_and_allocate_nothing_later(monkeypatch):
    engine = make_engine(small_plan(LAYERS, 2), LocalGroup(2, timeout=SOON).transport(0))
    other = make_engine(small_plan(LAYERS, 2), engine.forward._transport.group.transport(1))

    def run_both():
        thread = threading.Thread(target=go_through, args=(other.forward,), daemon=True)
        thread.start()
        go_through(engine.forward)
        thread.join(SOON)

    run_both()
    addresses = [engine.arena.cache(i).data_ptr() for i in range(LAYERS)]
    for name in ("empty", "zeros", "empty_like", "full"):
        monkeypatch.setattr(torch, name, None)
    for _ in range(5):
        run_both()
    assert [engine.arena.cache(i).data_ptr() for i in range(LAYERS)] == addresses


def test_a_stage_of_global_indices_is_addressed_by_ordinal():
    """Layers 38..41 of a model are ordinals 0..3 of their stage."""

    specs = [replace(s, index=s.index + 38, layer=f"layers.{s.index + 38}") for s in small_specs(LAYERS)]
    kvpp = make_engine(plan_stage(specs, ranks=2), Alone()).forward
    kvpp.begin(history=True)
    kvpp.acquire(0)
    with pytest.raises(CoverageError, match=r"layers\.38"):
        kvpp.end()

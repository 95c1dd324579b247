"""One rank's forward when all goes well: what is sent, when, and what it is compiled from."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from kvpp_dag.errors import (
    ConfigError,
    CoverageError,
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
    compile,
    compile_forwards,
)
from kvpp_dag.runtime.payload import FULL, NOTHING
from tests.runtime.forward_support import LAYERS, SOON, Alone, go_through
from tests.runtime_support import NUM_BLOCKS, make_engine, small_plan, small_specs


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
        """How many broadcasts the worker has come to, once it stands still."""
        came, before = -1, None
        while came != before or came < started[len(seen)]:
            before = came
            time.sleep(0.02)
            came = len(transport.calls) - 1
        seen.append(came)

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
    sent = [[(n.id, n.owner, n.bytes) for n in kinds[FULL].broadcasts] for kinds in graphs]
    assert sent[0] == sent[1] == sent[2]
    assert len(sent[0]) == 5
    assert all(not kinds[NOTHING].broadcasts for kinds in graphs)


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


@pytest.mark.parametrize("fields", [{"bytes": 1}, {"owner": 1}, {"layer": 2}])
def test_a_rank_that_would_issue_other_collectives_is_refused(monkeypatch, fields):
    """A builder that gives one rank another broadcast, and one that foresees that for another rank."""

    def other_graph(*args, **options):
        graph = build(*args, **options)
        nodes = [replace(n, **fields) if n.id == "broadcast[1]" else n for n in graph.nodes]
        return replace(graph, nodes=tuple(nodes))

    def other_collectives(*args, **options):
        *issued, last = foresee(*args, **options)
        nodes = [replace(n, **fields) if n.id == "broadcast[1]" else n for n in last.issued]
        return [*issued, replace(last, issued=tuple(nodes))]

    build, foresee = compile.build_forward, compile.build_collectives
    for rank in range(3):
        compile_forwards(small_plan(5, 3), rank, NUM_BLOCKS, Policy.ON_ACQUIRE)
        for name, careless in (("build_forward", other_graph), ("build_collectives", other_collectives)):
            with monkeypatch.context() as patch:
                patch.setattr(compile, name, careless)
                patch.setattr(compile, "ensure_sound", lambda graphs: None)
                with pytest.raises(UnsoundGraphError, match="collective order of ranks"):
                    compile_forwards(small_plan(5, 3), rank, NUM_BLOCKS, Policy.ON_ACQUIRE)


def test_transfers_are_prepared_once_and_allocate_nothing_later(monkeypatch):
    group = LocalGroup(2, timeout=SOON)
    engine, other = (make_engine(small_plan(LAYERS, 2), group.transport(rank)) for rank in range(2))

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

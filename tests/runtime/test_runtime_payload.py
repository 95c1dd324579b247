"""Payloads active and auto: the same outputs to the bit, and no more sent than is used."""

from functools import partial

import numpy as np
import pytest

from kvpp_dag.errors import BlocksError, ConfigError
from kvpp_dag.graph import Policy
from kvpp_dag.plan import plan_stage
from kvpp_dag.runtime import Arena, Costs, CpuStream, ForwardPass, HostStream, LocalGroup, Payload
from kvpp_dag.runtime.payload import FULL, RUNS, Way, WayChooser, blocks_in_use
from kvpp_dag.trace import Recorder
from kvpp_dag.trace.summary import summarize
from tests.runtime.paged import NUM_BLOCKS, POISON, WAYS, Step, make_steps, run_steps
from tests.runtime_support import Counting, run_group, small_specs

LAYERS = 5
STEPS = make_steps(1, 24)


def reference(layers, steps):
    return run_steps(LocalGroup(1).transport(0), layers, steps)


def served(kind, ranks, layers, steps, **settings):
    results = run_group(kind, ranks, partial(run_steps, **settings), layers, steps)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def check(results, expected):
    for rank in results:
        assert rank.outputs == expected.outputs
        assert rank.owned == {i: expected.owned[i] for i in rank.owned}
        assert rank.guards_intact
    assert sorted(i for rank in results for i in rank.owned) == sorted(expected.owned)


def bytes_used(layers, steps):
    per_block = sum(s.bytes_per_block for s in small_specs(layers) if not s.draft)
    return per_block * sum(len(step.used) for step in steps)


def test_the_steps_are_scattered_and_of_all_sizes():
    used = [len(step.used) for step in STEPS]
    assert 0 in used
    assert {1 << max(-(-u // 5) - 1, 0).bit_length() for u in used if u} >= {1, 2, 4}
    runs = [len(blocks_in_use(s.used, s.fresh, NUM_BLOCKS).runs()) for s in STEPS]
    assert max(runs) > 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize(("ranks", "layers", "depth"), [(2, 5, 1), (3, 5, 1), (2, 4, 2), (3, 2, 1)])
def test_active_computes_what_one_rank_computes(ranks, layers, depth, policy, way):
    results = served("local", ranks, layers, STEPS, costs=WAYS[way], policy=policy, depth=depth)
    check(results, reference(layers, STEPS))
    assert {rank.bytes_sent for rank in results} == {bytes_used(layers, STEPS)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gloo", "shared"])
def test_active_between_processes(kind, way):
    results = served(kind, 2, LAYERS, STEPS, costs=WAYS[way])
    check(results, reference(LAYERS, STEPS))
    assert {rank.bytes_sent for rank in results} == {bytes_used(LAYERS, STEPS)}


@pytest.mark.parametrize(("kind", "together"), [("gloo", False), ("shared", True)])
def test_runs_are_one_broadcast_a_layer_where_the_transport_sends_them_together(kind, together):
    with_history = sum(bool(step.used) for step in STEPS)
    for rank in served(kind, 2, LAYERS, STEPS, costs=WAYS["runs"]):
        assert (rank.broadcasts_sent == LAYERS * with_history) is together
        assert rank.broadcasts_sent >= LAYERS * with_history > 0


def test_control_a_block_that_is_not_listed_does_not_arrive_with_its_run():
    results = served("shared", 2, LAYERS, STEPS, costs=WAYS["runs"], forget=0)
    expected = reference(LAYERS, STEPS)
    assert all(rank.outputs != expected.outputs for rank in results)


@pytest.mark.parametrize("payload", list(Payload))
@pytest.mark.parametrize("seed", [2, 3])
def test_every_payload_with_costs_between(payload, seed):
    steps = make_steps(seed, 30)
    costs = Costs(start=1e-6, run=1e-6, copy_start=1e-7, send=1e-9, copy=1e-10)
    check(served("local", 2, LAYERS, steps, payload=payload, costs=costs), reference(LAYERS, steps))


@pytest.mark.parametrize("way", WAYS)
def test_control_a_block_that_is_not_listed_is_not_sent(way):
    results = served("local", 2, LAYERS, STEPS, costs=WAYS[way], forget=0)
    expected = reference(LAYERS, STEPS)
    for rank in results:
        for step, ours, right in zip(STEPS, rank.outputs, expected.outputs, strict=True):
            assert (ours == right) is (len(step.used) <= 1) or not step.used
            if len(step.used) > 1:
                break


@pytest.mark.parametrize("way", WAYS)
def test_fresh_blocks_read_as_zeros_where_they_are_received(way):
    """What was there is poison, as the control shows, in which nothing is sent, unpacked or cleared."""
    for rank in served("local", 2, LAYERS, STEPS, costs=WAYS[way]):
        assert rank.fresh_seen == {0}
    control = served("local", 2, LAYERS, STEPS, costs=WAYS[way], skip_broadcasts=True)
    assert POISON in control[0].fresh_seen


def test_control_nothing_sent():
    results = served("local", 2, LAYERS, STEPS, costs=WAYS["packed"], skip_broadcasts=True)
    assert results[0].outputs != reference(LAYERS, STEPS).outputs
    assert (results[0].bytes_sent, results[0].broadcasts_sent) == (0, 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", [0, 2, 4])
def test_after_an_aborted_forward_the_next_is_right(way, layer):
    late = next(i for i, step in enumerate(STEPS) if i > 3 and len(step.used) > 8)
    results = served("local", 2, LAYERS, STEPS, costs=WAYS[way], fail=(1, late, layer))
    check(results, reference(LAYERS, STEPS))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_recorded_are_the_bytes_that_were_sent(way):
    recorder = Recorder(keep=100)

    def work(transport, layers, steps):
        observer = recorder if transport.rank == 0 else None
        return run_steps(transport, layers, steps, costs=WAYS[way], observer=observer)

    run_group("local", 2, work, LAYERS, STEPS)
    for step, forward in zip(STEPS, recorder.forwards, strict=True):
        assert forward.needed_blocks == len(step.used)
        assert forward.sent_blocks == len(step.used)
        sent = sum(node.bytes for node in forward.graph.broadcasts)
        assert sent == bytes_used(LAYERS, [step])
        assert sorted(forward.spans) == sorted(node.id for node in forward.graph.nodes)


@pytest.mark.parametrize("way", WAYS)
def test_the_broadcasts_that_were_made_are_counted_and_no_chunk_that_stays_empty(way):
    recorder = Recorder(keep=100)

    def work(transport, layers, steps):
        counting = Counting(transport)
        observer = recorder if transport.rank == 0 else None
        result = run_steps(counting, layers, steps, costs=WAYS[way], observer=observer)
        return counting.made, result.broadcasts_sent

    ((made, counted), (others, _)) = run_group("local", 2, work, LAYERS, STEPS)
    assert made == others == counted > 0
    if way == "packed":
        assert summarize(recorder.forwards).broadcasts == made
        nodes = sum(len(f.graph.broadcasts) for f in recorder.forwards if f.sent_blocks)
        assert nodes > made  # some chunks stayed empty


def forward_of(payload=Payload.ACTIVE, *, staging=True, copy=True, ranks=2):
    plan = plan_stage(small_specs(LAYERS), ranks=ranks, staging=staging)
    return ForwardPass(
        arena=Arena(plan, rank=0, num_blocks=NUM_BLOCKS),
        transport=LocalGroup(ranks).transport(0),
        compute=HostStream("compute", timeout=5.0),
        transfer=CpuStream("transfer", timeout=5.0),
        copy=CpuStream("copy", timeout=5.0) if copy else None,
        payload=payload,
    )


@pytest.mark.parametrize("payload", [Payload.ACTIVE, Payload.AUTO])
@pytest.mark.parametrize(("missing", "said"), [("staging", "staging halves"), ("copy", "copy stream")])
def test_what_a_payload_needs_is_asked_for_at_once(payload, missing, said):
    with pytest.raises(ConfigError, match=said):
        forward_of(payload, **{missing: False})
    forward_of(Payload.FULL, **{missing: False})
    forward_of(payload, **{missing: False}, ranks=1)


@pytest.mark.parametrize(
    ("used", "fresh"),
    [([3, 2], []), ([2, 2], []), ([-1, 2], []), ([NUM_BLOCKS], []), ([0], [5, 4]), ([0], [NUM_BLOCKS])],
)
def test_lists_that_are_wrong_are_refused_and_leave_no_forward_in_flight(used, fresh):
    forward = forward_of()
    with pytest.raises(BlocksError, match="ascending"):
        forward.begin(history=True, used=used, fresh=fresh)
    assert not forward.active


def test_ranks_that_list_different_blocks_diverge():
    def work(transport):
        steps = [Step(used=[1, 3, 5 + transport.rank], fresh=[9])]
        return run_steps(transport, LAYERS, steps)

    results = run_group("local", 2, work)
    assert {type(result).__name__ for result in results} == {"DivergenceError"}


def chooser(payload, **costs):
    plan = plan_stage(small_specs(LAYERS), ranks=2, staging=True)
    return WayChooser.of(plan, 1000, payload, Costs(**costs))


def test_few_scattered_blocks_are_packed_long_runs_go_in_place_and_most_of_the_cache_goes_whole():
    auto = chooser(Payload.AUTO, start=100e-6, send=1e-7, copy_start=20e-6, copy=5e-8)
    assert auto.choose(used=100, runs=90)[0] is Way.PACKED
    assert auto.choose(used=100, runs=1) == RUNS
    assert auto.choose(used=1000, runs=1) == FULL
    assert auto.choose(used=950, runs=600) == FULL
    active = chooser(Payload.ACTIVE, start=100e-6, send=1e-7, copy_start=20e-6, copy=5e-8)
    assert active.choose(used=950, runs=600)[0] is Way.PACKED


def test_chunks_are_few_and_hold_what_they_must():
    active = chooser(Payload.ACTIVE)
    counts = active.chunk_counts()
    assert counts == [1, 2, 4, 8]
    for used in range(1, 1001):
        chunks = active.chunks(used)
        assert chunks in counts
        assert -(-used // chunks) <= active.staging_blocks


@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 63, 1000])
def test_halves_are_a_small_part_of_the_cache(blocks):
    plan = plan_stage(small_specs(LAYERS), ranks=2, staging=True)
    assert 0 < plan.staging_blocks(blocks) <= -(-blocks // 8)
    assert plan_stage(small_specs(LAYERS), ranks=2).staging_blocks(blocks) == 0
    assert plan_stage(small_specs(LAYERS), ranks=1, staging=True).staging_blocks(blocks) == 0


def test_runs_of_blocks():
    blocks = blocks_in_use(np.array([0, 1, 2, 5, 7, 8]), [], 10)
    assert blocks.runs() == [(0, 3), (5, 6), (7, 9)]
    assert blocks_in_use([], [], 10).runs() == []
    for ids in ([0, 1, 2, 5, 7, 8], [4], [3, 4], [0, 2, 4], []):
        blocks = blocks_in_use(ids, [], 10)
        assert blocks.run_count == len(blocks.runs())

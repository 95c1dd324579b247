"""The self check on a device: it passes where everything holds, and names what does not, by delays of its own."""

from functools import partial

import pytest
import torch

from kvpp_dag.errors import SelfCheckError
from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM, Policy, verify, without_edge
from kvpp_dag.graph.nodes import EVENTS
from kvpp_dag.plan import plan_stage
from kvpp_dag.runtime import (
    Payload,
    compile_forwards,
    known_bytes,
    packing,
    programs,
    self_check,
)
from kvpp_dag.runtime.payload import FULL, NOTHING, RUNS, Way
from kvpp_dag.trace import Recorder
from tests.device.self_check_ranks import check_ranks
from tests.runtime_support import small_specs

TRIES = 3
"""A missing wait is found by timing: on a busy machine it may take more than one self check."""


def passed(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def failures(results):
    """What each rank said; all of them must have refused."""
    assert all(isinstance(result, SelfCheckError) for result in results), results
    return [str(result) for result in results]


@pytest.mark.parametrize("payload", [Payload.FULL, Payload.AUTO])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("policy", list(Policy))
def test_it_passes_with_every_policy_depth_and_payload(device, policy, depth, payload):
    for checked, _ in passed(check_ranks(device, policy=policy, depth=depth, payload=payload)):
        packed = [(Way.PACKED, n) for n in (1, 2, 4, 8)]
        more = [] if payload is Payload.FULL else [*packed, RUNS]
        assert sorted(checked.kinds) == sorted([NOTHING, FULL, *more])
        assert checked.forwards >= 15


@pytest.mark.parametrize(("layers", "ranks", "blocks"), [(7, 3, 64), (2, 3, 5), (3, 2, 1)])
def test_it_passes_with_more_ranks_than_owners_and_few_blocks(device, layers, ranks, blocks):
    passed(check_ranks(device, ranks, layers=layers, blocks=blocks))


def test_with_one_stream_s_waits_dropped_every_rank_refuses(device):
    for dropped in (COMPUTE_STREAM, TRANSFER_STREAM, COPY_STREAM):
        said = failures(check_ranks(device, dropped=dropped))
        assert any(" failed on rank " in text and "first wrong block is" in text for text in said)
        if dropped == COPY_STREAM:
            assert any("'packed in" in text for text in said)


def test_with_nothing_sent_every_rank_refuses(device):
    for rank, text in enumerate(failures(check_ranks(device, skip_broadcasts=True))):
        layer, owner = (3, 1) if rank == 0 else (0, 0)
        assert text.startswith(
            f"The self check failed on rank {rank}: layer 'layers.{layer}.attn' (ordinal {layer}) did not hold "
            f"what rank {owner} had sent when compute might read it, in a forward of the way 'full'. The first "
            "wrong block is 0 of 'main'; "
        )


class Wrapped:
    """A transport, to do something wrong around."""

    def __init__(self, inner):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size

    def prepare(self, view, owner):
        return self.inner.prepare(view, owner)

    def agree(self, token):
        self.inner.agree(token)


class Shifting(Wrapped):
    """What rank 1 receives of the first layer, of 32 bytes a block, lies one block too far."""

    def __init__(self, inner):
        super().__init__(inner)
        self.prepared = 0

    def prepare(self, view, owner):
        broadcast = super().prepare(view, owner)
        self.prepared += 1
        if self.rank == 0 or self.prepared > 1:
            return broadcast
        page, copy = 24, torch.empty_like(view)

        def shifted():
            broadcast()
            copy.copy_(view)
            view[page:].copy_(copy[:-page])

        return shifted


def test_a_block_shifted_by_one_is_named_and_the_other_rank_refuses_too(device):
    well, wrong = failures(check_ranks(device, payload=Payload.FULL, wrap=Shifting))
    assert "layer 'layers.0.attn' (ordinal 0) did not hold what rank 0 had sent" in wrong
    assert "in a forward of the way 'full'. The first wrong block is 1 of 'main'; 1 of 5 layers" in wrong
    assert well.startswith("The self check found nothing wrong on rank 0, but failed on another rank")


class Swapping(Wrapped):
    """Rank 0 sends its second layer in place of its first, which is as large, and the other way round."""

    def __init__(self, inner):
        super().__init__(inner)
        self.views = []

    def prepare(self, view, owner):
        self.views.append(view)
        number = len(self.views) - 1
        if self.rank or number > 1:
            return super().prepare(view, owner)
        made = []

        def swapped():
            if not made:
                made.append(self.inner.prepare(self.views[1 - number], owner))
            made[0]()

        return swapped


def test_two_layers_swapped_are_named(device):
    _, wrong = failures(check_ranks(device, payload=Payload.FULL, wrap=Swapping))
    assert "layer 'layers.0.attn' (ordinal 0) did not hold what rank 0 had sent" in wrong
    assert "The first wrong block is 0 of 'main'; 2 of 5 layers were wrong" in wrong


def test_a_packed_block_that_is_not_put_in_its_place_is_named(device, monkeypatch):
    def lose_the_last(rows, ids, packed):
        rows.index_copy_(0, ids[:-1], packed[:-1])

    monkeypatch.setattr(packing, "_put_rows", lose_the_last)
    for text in failures(check_ranks(device)):
        assert "in a forward of the way 'packed in 1 chunk'" in text
        assert "The first wrong block is 63 of 'main'" in text


@pytest.mark.parametrize("policy", list(Policy))
def test_every_single_wait_of_whole_bundles_that_is_left_out_is_found(device, monkeypatch, policy):
    """Every edge whose loss the proof calls a race, on either rank."""
    count = 0
    for rank in range(2):
        graph = graph_of(rank, policy, FULL)
        for broken, edge in unsound(graph):
            assert found(device, monkeypatch, graph, broken, policy, Payload.FULL), (rank, edge)
            count += 1
    assert count == 11


@pytest.mark.matrix
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("chunks", [2, 4])
def test_single_waits_of_packed_forwards_that_are_left_out_are_found(
    device, monkeypatch, policy, chunks
):
    """All waits for ready and completion events; of those between copies and transfers, the first of each layer.

    Nothing can be delayed between the chunks of one layer, so the others are found by luck.
    """
    for rank in range(2):
        graph = graph_of(rank, policy, (Way.PACKED, chunks))
        for broken, edge in unsound(graph):
            if edge[0].split("[")[0] in ("ready", "completion", "arrived.0"):
                assert found(device, monkeypatch, graph, broken, policy, Payload.AUTO), (rank, edge)


def graph_of(rank, policy, kind):
    """The graph of a kind on one rank, as the ranks of `check_ranks` compile it."""
    plan = plan_stage(small_specs(5), ranks=2, staging=kind != FULL)
    return compile_forwards(plan, rank, 64, policy, [kind[1]] if kind[1] else [])[kind]


def unsound(graph):
    """`graph` without one wait of a stream for another, and that wait, where a race follows."""
    for node in graph.nodes:
        for before in node.after:
            if graph[before].kind in EVENTS and graph[before].stream != node.stream:
                broken = without_edge(graph, before, node.id)
                if any(finding.rule in ("race", "content") for finding in verify(broken)):
                    yield broken, (before, node.id)


def found(device, monkeypatch, graph, broken, policy, payload):
    """Whether ranks that run `broken` for `graph` refuse to start."""
    right = programs.lower
    with monkeypatch.context() as patch:
        patch.setattr(programs, "lower", lambda g: right(broken if g == graph else g))
        for _ in range(TRIES):
            results = check_ranks(device, policy=policy, payload=payload)
            if any(isinstance(result, SelfCheckError) for result in results):
                failures(results)
                return True
    return False


@pytest.mark.parametrize("payload", [Payload.FULL, Payload.AUTO])
def test_large_bundles_are_cut_to_the_blocks_that_are_compared(device, monkeypatch, payload):
    monkeypatch.setattr(self_check, "LARGEST", 1)
    sent = {0: [], 1: []}

    class Measuring(Wrapped):
        def prepare(self, view, owner):
            broadcast = super().prepare(view, owner)

            def measured():
                sent[self.rank].append(view.numel())
                broadcast()

            return measured

    passed(check_ranks(device, payload=payload, wrap=Measuring, after=whole_bundles_again))
    for rank in range(2):
        assert max(sent[rank]) < 32 * 64 < 48 * 64  # the smallest bundle, the largest
    for dropped in (COMPUTE_STREAM, TRANSFER_STREAM):
        assert any(
            "'full'" in text for text in failures(check_ranks(device, payload=payload, dropped=dropped))
        )


def whole_bundles_again(rank):
    assert programs.CUT not in rank.forward._programs.kinds


@pytest.mark.parametrize("payload", [Payload.FULL, Payload.AUTO])
def test_it_leaves_everything_as_it_was(device, payload):
    """No count, no recording, no byte; the first forward is number 1, and sends what it should."""
    recorders = [Recorder(), Recorder()]
    after = partial(check_untouched, recorders=recorders)
    passed(check_ranks(device, payload=payload, observer=recorders.__getitem__, after=after))


def check_untouched(rank, recorders):
    forward, recorder = rank.forward, recorders[rank.transport.rank]
    counts = (
        forward.forwards,
        forward.forwards_with_history,
        forward.broadcasts_sent,
        forward.bytes_sent,
    )
    assert counts == (0, 0, 0, 0)
    assert recorder.forwards == ()
    for tensor in rank.arena._tensors():
        assert not tensor.cpu().any()
    for used in ((), (0, 5), (0, 5), (1, 2, 3), (0, 1)):
        forward.begin(history=bool(used), used=used)
        for layer in range(5):
            forward.acquire(layer)
            forward.release(layer)
        forward.end()
    forward.synchronize()
    assert [record.number for record in recorder.forwards] == [1, 2, 3, 4, 5]
    for record in recorder.forwards:
        assert record.missing == 0
        assert sorted(record.spans) == sorted(node.id for node in record.graph.nodes)
        for span in record.spans.values():
            assert record.began <= span.start <= span.end <= record.ended < record.began + 20e9


def test_known_bytes_tell_owner_layer_component_forward_block_and_place_apart():
    """Also in pages of single bytes, for all neighbours that can lie in one buffer."""
    for step in ("_OWNER", "_LAYER", "_COMPONENT", "_FORWARD", "_BLOCK", "_PLACE"):
        assert getattr(known_bytes, step) % 2 == 1
    steps = [
        layer * known_bytes._LAYER + forward * known_bytes._FORWARD
        for layer in range(16)
        for forward in range(4)
    ]
    assert len({step % 256 for step in steps}) == len(steps)

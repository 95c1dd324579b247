from itertools import product

import pytest

from kvpp_dag.errors import GraphError
from kvpp_dag.graph import (
    Kind,
    Policy,
    build_collectives,
    build_forward,
    from_json,
    from_text,
    lower,
    to_json,
    to_text,
    verify,
    verify_group,
    without_edge,
)
from kvpp_dag.graph.collectives import collective_order
from tests.builders import edges, forward, group, stage
from tests.judge import fault_of

ACQUIRE, RELEASE = Policy.ON_ACQUIRE, Policy.ON_RELEASE
over_layers_and_depths = pytest.mark.parametrize(
    ("policy", "layers", "depth"), list(product(Policy, range(9), (1, 2, 3)))
)


def groups(layers, **settings):
    """The forward of every rank of groups of 2 to 9 ranks."""
    return [graph for ranks in range(2, 10) for graph in group(layers, ranks, **settings)]


def _order(policy, layers, depth):
    """Issue order in short: r/b/c are a transfer's nodes, P, A and C compute."""
    graph = forward(layers, 2, policy=policy, depth=depth)
    letters = {"ready": "r", "broadcast": "b", "completion": "c"} | {
        "prologue": "P",
        "attend": "A",
        "compute": "C",
    }
    names = (node.id.rstrip("]").split("[") for node in graph.nodes)
    return " ".join("".join((letters[name], *index)) for name, *index in names)


@pytest.mark.parametrize(
    ("policy", "layers", "depth", "expected"),
    [
        (ACQUIRE, 1, 1, "r0 b0 c0 P A0 C0"),
        (ACQUIRE, 3, 1, "r0 b0 c0 P r1 b1 c1 A0 C0 r2 b2 c2 A1 C1 A2 C2"),
        (ACQUIRE, 3, 2, "r0 b0 c0 r1 b1 c1 P r2 b2 c2 A0 C0 A1 C1 A2 C2"),
        (ACQUIRE, 2, 3, "r0 b0 c0 r1 b1 c1 P A0 C0 A1 C1"),
        (RELEASE, 1, 1, "r0 b0 c0 P A0 C0"),
        (RELEASE, 3, 1, "r0 b0 c0 r1 b1 c1 P A0 r2 b2 c2 C0 A1 C1 A2 C2"),
        (RELEASE, 4, 2, "r0 b0 c0 r1 b1 c1 r2 b2 c2 P A0 r3 b3 c3 C0 A1 C1 A2 C2 A3 C3"),
        (RELEASE, 0, 1, "P"),
    ],
)
def test_issue_order(policy, layers, depth, expected):
    assert _order(policy, layers, depth) == expected


@over_layers_and_depths
def test_edges_are_those_of_the_design(policy, layers, depth):
    expected = {}
    for i in range(layers):
        expected[f"ready[{i}]"] = {f"attend[{i - depth - 1}]"} if i > depth else set()
        expected[f"broadcast[{i}]"] = {f"ready[{i}]"} | ({f"broadcast[{i - 1}]"} if i else set())
        expected[f"completion[{i}]"] = {f"broadcast[{i}]"}
        expected[f"attend[{i}]"] = {f"completion[{i}]"}
    for graph in groups(layers, policy=policy, depth=depth):
        assert {n.id: set(n.after) for n in graph.nodes if n.after or n.id in expected} == expected


@over_layers_and_depths
def test_the_owner_reads_its_buffer_and_the_others_fill_the_slot(policy, layers, depth):
    for graph in groups(layers, policy=policy, depth=depth, num_blocks=7):
        owners = stage(layers, graph.ranks, depth).owners
        assert len(graph.broadcasts) == layers
        for i, node in enumerate(graph.broadcasts):
            mine = owners[i] == graph.rank
            slot = i % (depth + 1)
            assert (node.owner, node.slot, node.layer) == (owners[i], slot, i)
            assert node.bytes == (10 if i % 3 == 0 else 8) * 7
            assert node.reads == ((f"persistent[{i}]",) if mine else ())
            assert node.writes == (() if mine else (f"scratch[{slot}]",))
            cache = f"persistent[{i}]" if mine else f"scratch[{slot}]"
            assert graph[f"attend[{i}]"].reads == graph[f"attend[{i}]"].writes == (cache,)


@over_layers_and_depths
def test_kinds_and_streams(policy, layers, depth):
    for node in forward(layers, policy=policy, depth=depth).nodes:
        kind, stream = {
            "ready": (Kind.READY, "compute"),
            "broadcast": (Kind.BROADCAST, "transfer"),
            "completion": (Kind.COMPLETION, "transfer"),
        }.get(node.id.split("[")[0], (Kind.COMPUTE, "compute"))
        assert (node.kind, node.stream) == (kind, stream)


@over_layers_and_depths
def test_without_history_nothing_is_broadcast(policy, layers, depth):
    for graph in groups(layers, policy=policy, depth=depth, history=False):
        assert {node.kind for node in graph.nodes} == {Kind.COMPUTE}
        assert len(graph.nodes) == 1 + 2 * layers
        assert not any(node.reads or node.after for node in graph.nodes)
        assert all(len(graph[f"attend[{i}]"].writes) == 1 for i in range(layers))


def test_a_group_of_one_broadcasts_nothing_even_with_history():
    graph = forward(4, 1, history=True)
    assert graph.broadcasts == ()
    assert graph.history is True


def test_ids_are_equal_on_every_rank():
    first, *others = group(5, 3)
    assert all([n.id for n in g.nodes] == [n.id for n in first.nodes] for g in others)


def test_the_graph_says_what_it_was_built_for():
    plan = stage(3, 2, 2)
    graph = build_forward(plan, rank=1, num_blocks=4, history=True, policy=RELEASE)
    assert (graph.rank, graph.ranks, graph.depth, graph.policy) == (1, 2, 2, RELEASE)
    assert graph.layout_hash == plan.layout_hash


def test_the_release_policy_opens_the_window_one_compute_earlier():
    """The ready event of layer 2 is recorded before compute[0], not after it."""
    positions = [forward(3, policy=policy).position for policy in (RELEASE, ACQUIRE)]
    assert positions[0]["attend[0]"] < positions[0]["ready[2]"] < positions[0]["compute[0]"]
    assert positions[1]["compute[0]"] < positions[1]["ready[2]"] < positions[1]["attend[1]"]


def test_no_blocks_are_zero_bytes_and_fewer_are_refused():
    assert {n.bytes for n in forward(3, num_blocks=0).broadcasts} == {0}
    with pytest.raises(GraphError, match="-1 blocks"):
        forward(3, num_blocks=-1)


@pytest.mark.parametrize("rank", [2, -1])
@pytest.mark.parametrize("history", [True, False])
def test_a_rank_outside_the_group_is_refused(rank, history):
    with pytest.raises(GraphError, match=f"Rank {rank}"):
        forward(3, 2, rank=rank, history=history)


PACKED = list(product(Policy, (1, 2, 3), (1, 2, 4)))
over_policies_depths_and_chunks = pytest.mark.parametrize(("policy", "depth", "chunks"), PACKED)


def test_one_chunk_is_packed_and_unpacked_on_the_transfer_stream():
    graph = forward(2, 2, chunks=1)
    transfer = [node.id for node in graph.nodes if node.layer == 1 and node.stream == "transfer"]
    assert transfer == ["pack[1]", "broadcast[1]", "unpack[1]", "completion[1]"]
    assert graph["pack[1]"].after == ("ready[1]",)
    assert graph["broadcast[1]"].after == ("broadcast[0]", "pack[1]")
    assert graph["unpack[1]"].after == ("broadcast[1]",)
    assert graph["completion[1]"].after == ("unpack[1]",)
    assert not any(node.stream == "copy" for node in graph.nodes)


def test_several_chunks_are_packed_beside_the_sending():
    graph = forward(2, 2, chunks=2)
    ids = [node.id for node in graph.nodes if node.layer == 1 and node.stream != "compute"]
    assert ids == [
        *("pack.0[1]", "packed.0[1]", "broadcast.0[1]", "arrived.0[1]"),
        *("pack.1[1]", "packed.1[1]", "unpack.0[1]"),
        *("broadcast.1[1]", "arrived.1[1]", "unpack.1[1]", "completion[1]"),
    ]
    streams = {node.id.split(".")[0]: node.stream for node in graph.nodes if "." in node.id}
    assert streams == {
        **dict.fromkeys(("pack", "packed", "unpack"), "copy"),
        **dict.fromkeys(("broadcast", "arrived"), "transfer"),
    }
    assert graph["completion[1]"].stream == "copy"
    assert graph["broadcast.0[1]"].after == ("broadcast.1[0]", "packed.0[1]")
    assert graph["broadcast.1[1]"].after == ("broadcast.0[1]", "packed.1[1]")
    assert graph["unpack.1[1]"].after == ("arrived.1[1]",)


@over_policies_depths_and_chunks
def test_chunks_take_turns_over_the_staging_halves(policy, depth, chunks):
    for graph in group(5, 3, policy=policy, depth=depth, chunks=chunks, num_blocks=7):
        owners = stage(5, 3, depth).owners
        assert len(graph.broadcasts) == 5 * chunks
        for number, node in enumerate(graph.broadcasts):
            layer, half = number // chunks, (f"staging[{number % 2}]",)
            mine = owners[layer] == graph.rank
            assert (node.layer, node.owner, node.slot) == (layer, owners[layer], None)
            assert node.bytes == (10 if layer % 3 == 0 else 8) * 7
            assert (node.reads, node.writes) == ((half, ()) if mine else ((), half))
        copies = [node for node in graph.nodes if node.kind is Kind.COPY]
        packs = [node for node in copies if node.slot is None]
        unpacks = [node for node in copies if node.slot is not None]
        assert len(packs) == len(unpacks) == 5 * chunks
        for number, (pack, unpack) in enumerate(zip(packs, unpacks, strict=True)):
            layer, half = number // chunks, (f"staging[{number % 2}]",)
            mine = owners[layer] == graph.rank
            slot = (f"scratch[{layer % (depth + 1)}]",)
            assert (pack.reads, pack.writes) == (((f"persistent[{layer}]",), half) if mine else ((), ()))
            assert (unpack.reads, unpack.writes) == (((), ()) if mine else (half, slot))


@over_policies_depths_and_chunks
def test_packed_forwards_are_sound_alike_on_all_ranks_and_survive_their_dumps(policy, depth, chunks):
    for layers in (0, 1, 2, 5):
        graphs = group(layers, 3, policy=policy, depth=depth, chunks=chunks)
        assert verify_group(graphs) == ()
        for graph in graphs:
            assert from_text(to_text(graph)) == graph
            assert from_json(to_json(graph)) == graph
            assert lower(graph).layers == layers


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(("layers", "chunks"), [(4, 1), (3, 2)])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_edge_of_a_packed_forward_is_needed_or_implied(policy, layers, chunks, rank):
    """What the judge finds by trying out every execution is what `verify` says, with an edge taken away."""
    graph = forward(layers, 2, rank=rank, policy=policy, chunks=chunks)
    verdicts = {True: 0, False: 0}
    for edge in edges(graph):
        broken = without_edge(graph, *edge)
        unsafe = fault_of([[broken, broken]]) is not None
        assert bool(verify(broken)) == unsafe, edge
        verdicts[unsafe] += 1
    assert verdicts[True] >= layers
    assert verdicts[False] >= layers  # those that stream order implies


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("chunks", [0, 1, 2, 4])
def test_collectives_of_all_ranks_are_those_of_their_graphs(policy, chunks):
    for layers, ranks, depth in [(0, 2, 1), (1, 3, 1), (5, 3, 2), (7, 2, 3), (4, 1, 1)]:
        plan = stage(layers, ranks, depth)
        issued = build_collectives(plan, num_blocks=4, policy=policy, chunks=chunks)
        graphs = group(layers, ranks, depth=depth, policy=policy, chunks=chunks)
        for one, graph in zip(issued, graphs, strict=True):
            assert one.issued == graph.issued
            assert (one.rank, one.ranks) == (graph.rank, graph.ranks)
            assert one.layout_hash == graph.layout_hash
        assert tuple(collective_order(issued)) == ()


def test_control_collectives_of_other_sizes_or_chunks_differ():
    plan = stage(3, 2)
    first, second = build_collectives(plan, num_blocks=4, policy=Policy.ON_ACQUIRE, chunks=2)
    for num_blocks, chunks, policy in (
        (5, 2, Policy.ON_ACQUIRE),
        (4, 1, Policy.ON_ACQUIRE),
        (4, 0, Policy.ON_ACQUIRE),
        (4, 2, Policy.ON_RELEASE),
    ):
        other = build_collectives(plan, num_blocks=num_blocks, policy=policy, chunks=chunks)[1]
        assert tuple(collective_order([first, other]))
    assert not tuple(collective_order([first, second]))

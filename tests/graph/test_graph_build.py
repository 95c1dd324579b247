from itertools import product

import pytest

from kvpp_dag.errors import GraphError
from kvpp_dag.graph import Kind, Policy, build_forward
from tests.builders import forward, group, stage

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

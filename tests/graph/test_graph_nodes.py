from dataclasses import replace

import pytest

from kvpp_dag.errors import GraphError
from kvpp_dag.graph import Graph, Kind, without_edge
from kvpp_dag.graph.nodes import KVPP_GROUP, MAX_BUFFERS, MAX_GROUPS, MAX_NUMBER, check_node
from tests.builders import compute, forward
from tests.graph.graph_strategies import HOSTILE


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("field", ["id", "stream", "reads", "writes", "collectives"])
def test_names_that_a_dump_could_not_carry_are_refused(field, name):
    node = compute("a")
    value = name if field in ("id", "stream") else (name,)
    with pytest.raises(GraphError, match="name"):
        Graph(nodes=(replace(node, **{field: value}),))


@pytest.mark.parametrize("name", ["a", "_x", "attend[0]", "layers.3/attn:q-1[123456789]", "a" * 200])
def test_ordinary_names_are_taken(name):
    assert Graph(nodes=(compute(name),))[name].id == name


@pytest.mark.parametrize("value", ["a b", "a\n# kvpp graph", "-", "x" * 65])
def test_a_layout_hash_that_a_dump_could_not_carry_is_refused(value):
    with pytest.raises(GraphError, match="layout hash"):
        Graph(nodes=(), layout_hash=value)


@pytest.mark.parametrize("field", ["layer", "owner", "slot", "bytes"])
def test_numbers_below_zero_are_refused(field):
    with pytest.raises(GraphError, match=f"'a' has {field} -1"):
        Graph(nodes=(compute("a", **{field: -1}),))
    assert Graph(nodes=(compute("a", **{field: 0}),))


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank, ranks):
    with pytest.raises(GraphError, match=f"Rank {rank}"):
        Graph(nodes=(), rank=rank, ranks=ranks)


def test_a_depth_below_one_is_refused():
    with pytest.raises(GraphError, match="depth is 0"):
        Graph(nodes=(), depth=0)


def test_an_id_that_occurs_twice_is_refused():
    with pytest.raises(GraphError, match="'a' occurs twice"):
        Graph(nodes=(compute("a"), compute("b"), compute("a")))


def test_an_unknown_predecessor_is_refused():
    with pytest.raises(GraphError, match=r"'a' comes after 'gone'"):
        Graph(nodes=(compute("a", after=("gone",)),))


def test_a_node_cannot_come_after_itself():
    with pytest.raises(GraphError, match="'a' comes after itself"):
        Graph(nodes=(compute("a", after=("a",)),))


def test_predecessors_compare_equal_however_they_were_listed():
    def graph(*after):
        return Graph(nodes=(compute("a"), compute("b"), compute("c", after=after)))

    assert graph("a", "b") == graph("b", "a") == graph("b", "a", "b")
    assert graph("a", "b") != graph("b")


def test_nodes_are_found_by_id():
    graph = forward(3)
    assert graph["attend[1]"].layer == 1
    assert [node.layer for node in graph.broadcasts] == [0, 1, 2]
    assert all(node.kind is Kind.BROADCAST for node in graph.broadcasts)
    with pytest.raises(KeyError):
        graph["attend[3]"]


def test_what_issues_collectives_is_listed_in_issue_order_with_its_groups():
    graph = forward(2)
    issued = [(node.id, node.groups) for node in graph.issued]
    kvpp, engine = ("kvpp",), ("engine",)
    assert issued == [
        ("broadcast[0]", kvpp),
        ("prologue", engine),
        ("broadcast[1]", kvpp),
        ("attend[0]", engine),
        ("compute[0]", engine),
        ("attend[1]", engine),
        ("compute[1]", engine),
    ]
    assert forward(2, ranks=1).issued == ()


def test_without_edge_takes_away_that_edge_and_nothing_else():
    graph = forward(3)
    less = without_edge(graph, "completion[1]", "attend[1]")
    assert less != graph
    assert "completion[1]" not in less["attend[1]"].after
    assert [n for n in less.nodes if n.id != "attend[1]"] == [
        n for n in graph.nodes if n.id != "attend[1]"
    ]
    with pytest.raises(GraphError, match="no edge"):
        without_edge(less, "completion[1]", "attend[1]")


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "a b"},
        {"stream": "#"},
        {"reads": ("x",) * (MAX_BUFFERS + 1)},
        {"writes": tuple(f"x[{i}]" for i in range(MAX_BUFFERS + 1))},
        {"collectives": ("tp",) * (MAX_GROUPS + 1)},
        {"collectives": ("tp", KVPP_GROUP)},
        {"kind": Kind.BROADCAST, "collectives": ("tp",)},
        {"layer": MAX_NUMBER + 1},
        {"owner": -1},
        {"slot": MAX_NUMBER + 1},
        {"bytes": -1},
        {"after": ("first", "gone")},
        {"after": ("middle",)},
    ],
)
def test_a_graph_objects_to_a_node_among_others_as_to_the_node_itself(fields):
    node = compute("middle", after=("first",))
    most = {"reads": ("x",) * MAX_BUFFERS, "writes": ("y",) * MAX_BUFFERS, "bytes": MAX_NUMBER}
    most["collectives"] = ("tp",) * MAX_GROUPS
    around = [compute("first"), replace(node, **most), compute("last", layer=MAX_NUMBER)]
    Graph(nodes=tuple(around))
    bad = replace(node, **fields)
    ids = {"first", bad.id, "last"}
    with pytest.raises(GraphError) as alone:
        check_node(bad, ids)
    with pytest.raises(GraphError) as together:
        Graph(nodes=(around[0], bad, around[2]))
    assert str(together.value) == str(alone.value)

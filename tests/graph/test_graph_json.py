import json
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given

from kvpp_dag.errors import DumpError
from kvpp_dag.graph import Policy, from_json, to_json, to_networkx
from tests.builders import changed, edges, forward, group
from tests.graph.graph_strategies import HOSTILE, graphs


@given(graphs())
def test_any_graph_comes_back_equal(graph):
    assert from_json(to_json(graph)) == graph


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("history", [True, False])
def test_compiled_graphs_come_back_equal(policy, history):
    for graph in group(5, 3, policy=policy, history=history, depth=2):
        assert from_json(to_json(graph)) == graph


def test_another_graph_has_another_dump():
    graph = forward(3)
    for other in (
        replace(graph, depth=2),
        replace(graph, layout_hash="other"),
        changed(graph, "broadcast[2]", owner=0),
        changed(graph, "attend[2]", after=()),
        changed(graph, "attend[2]", collectives=("tp", "ep")),
    ):
        assert to_json(other) != to_json(graph)
        assert from_json(to_json(other)) == other != graph


@given(graphs())
def test_networkx_opens_the_dump(graph):
    opened = nx.node_link_graph(json.loads(to_json(graph))["graph"], edges="edges")
    assert list(opened.nodes) == [node.id for node in graph.nodes]
    assert set(opened.edges) == set(edges(graph))
    for node in graph.nodes:
        data = opened.nodes[node.id]
        assert (data["kind"], data["stream"], data["bytes"]) == (node.kind, node.stream, node.bytes)
        assert (data["layer"], data["owner"], data["slot"]) == (node.layer, node.owner, node.slot)
        assert (data["reads"], data["writes"]) == (list(node.reads), list(node.writes))
        assert data["collectives"] == list(node.collectives)


def test_the_networkx_graph_of_a_forward_is_acyclic():
    opened = to_networkx(forward(4))
    assert nx.is_directed_acyclic_graph(opened)
    assert nx.has_path(opened, "ready[0]", "attend[0]")
    assert not nx.has_path(opened, "attend[3]", "ready[0]")


def test_a_dump_of_version_1_reads_as_one_whose_compute_issues_no_collectives():
    graph = forward(3, rank=1)
    dump = json.loads(to_json(graph))
    assert dump["schema_version"] == 2
    dump["schema_version"] = 1
    for node in dump["graph"]["nodes"]:
        del node["collectives"]
    nodes = tuple(replace(node, collectives=()) for node in graph.nodes)
    assert from_json(json.dumps(dump)) == replace(graph, nodes=nodes) != graph


def _set(path, value):
    def change(dump):
        *parents, last = path
        for key in parents:
            dump = dump[key]
        dump[last] = value

    return change


def _drop(*path):
    def change(dump):
        *parents, last = path
        for key in parents:
            dump = dump[key]
        del dump[last]

    return change


def _again(dump):
    dump["graph"]["nodes"].append(dump["graph"]["nodes"][0])


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (_drop("rank"), "rank"),
        (_drop("graph"), "graph"),
        (_drop("graph", "edges"), "graph.edges"),
        (_drop("graph", "nodes", 2, "kind"), "graph.nodes.2.kind"),
        (_set(["schema_version"], 3), "schema_version"),
        (_set(["rank"], "0"), "rank"),
        (_set(["rank"], 2), "the file"),
        (_set(["depth"], 0), "depth"),
        (_set(["policy"], "never"), "policy"),
        (_set(["history"], 1), "history"),
        (_set(["layout_hash"], "a b"), "the file"),
        (_set(["extra"], 1), "extra"),
        (_set(["graph"], []), "graph"),
        (_set(["graph", "nodes", 1, "kind"], "magic"), "graph.nodes.1.kind"),
        (_set(["graph", "nodes", 1, "owner"], -1), "graph.nodes.1.owner"),
        (_set(["graph", "nodes", 1, "bytes"], 1.5), "graph.nodes.1.bytes"),
        (_set(["graph", "nodes", 1, "reads"], "x"), "graph.nodes.1.reads"),
        (_set(["graph", "nodes", 1, "reads"], ["x y"]), "graph.nodes.1"),
        (_set(["graph", "nodes", 1, "colour"], "red"), "graph.nodes.1.colour"),
        (_set(["graph", "edges", 3, "source"], "gone"), "graph.edges.3"),
        (_set(["graph", "edges", 3, "target"], "gone"), "graph.edges.3"),
        (_set(["graph", "edges", 0], {"source": "ready[0]", "target": "ready[0]"}), "graph.nodes.0"),
        (_again, "graph.nodes.16"),
    ],
)
def test_a_place_that_cannot_be_read_is_named(change, place):
    dump = json.loads(to_json(forward(3)))
    assert len(from_json(json.dumps(dump)).nodes) == 16
    change(dump)
    with pytest.raises(DumpError) as caught:
        from_json(json.dumps(dump))
    assert str(caught.value).startswith(f"At {place}:")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"rank": NaN}', '{"rank": 1}\n{}'])
def test_what_is_not_a_dump_is_refused(text):
    with pytest.raises(DumpError, match=r"^At "):
        from_json(text)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_do_not_come_in_by_json(name):
    dump = json.loads(to_json(forward(1)))
    dump["graph"]["nodes"][0]["stream"] = name
    with pytest.raises(DumpError, match=r"^At graph\.nodes\.0: .*name"):
        from_json(json.dumps(dump))

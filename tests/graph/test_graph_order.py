from itertools import pairwise

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from kvpp_dag.graph.order import Cycle, Order, order_of
from tests.builders import forward
from tests.graph.graph_strategies import graphs


def _networkx(forwards) -> nx.DiGraph:
    dag, last, base = nx.DiGraph(), {}, 0
    for graph in forwards:
        for i, node in enumerate(graph.nodes, base):
            dag.add_node(i)
            dag.add_edges_from((base + graph.position[name], i) for name in node.after)
            if node.stream in last:
                dag.add_edge(last[node.stream], i)
            last[node.stream] = i
        base += len(graph.nodes)
    return dag


@given(st.lists(graphs(), min_size=1, max_size=2))
def test_ancestors_are_those_of_networkx_or_there_is_a_ring(forwards):
    dag = _networkx(forwards)
    order = order_of(forwards)
    if isinstance(order, Cycle):
        ring = order.nodes
        assert ring[0] == ring[-1]
        assert len(ring) > 1
        assert all(dag.has_edge(a, b) for a, b in pairwise(ring))
    else:
        assert nx.is_directed_acyclic_graph(dag)
        for i in dag:
            assert {j for j in dag if order.ancestors[i] >> j & 1} == nx.ancestors(dag, i)


def test_streams_carry_order_into_the_next_forward():
    graph = forward(2, history=False)
    order = order_of((graph, graph))
    assert isinstance(order, Order)
    last, first = len(graph.nodes) - 1, len(graph.nodes)
    assert order.ancestors[first] >> last & 1
    assert order.ordered(first, last)
    assert order.ordered(last, first)


def test_nodes_of_two_streams_without_an_edge_are_not_ordered():
    graph = forward(2)
    order = order_of((graph,))
    position = graph.position
    assert not order.ordered(position["broadcast[1]"], position["attend[0]"])
    assert order.ordered(position["broadcast[0]"], position["attend[0]"])

import re
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given

from kvpp_dag.errors import GraphError
from kvpp_dag.graph import to_dot
from tests.builders import changed, edges, forward
from tests.graph.graph_strategies import graphs

STRING = r'"((?:[^"\\]|\\.)*)"'
STATEMENTS = re.compile(
    rf"  subgraph cluster_\d+ \{{\n    label={STRING};\n"
    rf"|    {STRING} \[shape=(\w+), label={STRING}\];\n"
    rf"|  (?:  )?{STRING} -> {STRING}( \[style=dotted\])?;\n"
    r"|  \}\n"
)


def _read(dot: str):
    """Clusters, solid and dotted edges of a DOT text that must hold nothing else."""
    first, *_, rest = dot.split("\n", 3)
    assert first == "digraph kvpp {"
    assert rest.endswith("}\n")
    body = rest.removesuffix("}\n")
    clusters, solid, dotted, position, cluster = defaultdict(list), [], [], 0, None
    while position < len(body):
        match = STATEMENTS.match(body, position)
        assert match, body[position : position + 80]
        position = match.end()
        label, node, _, _, tail, head, style = match.groups()
        if label is not None:
            cluster = label
        elif node is not None:
            clusters[cluster].append(node)
        elif tail is not None:
            (dotted if style else solid).append((tail, head))
    return clusters, solid, dotted


@given(graphs())
def test_dot_holds_every_node_and_edge_once(graph):
    clusters, solid, dotted = _read(to_dot(graph))
    streams = defaultdict(list)
    for node in graph.nodes:
        streams[node.stream].append(node.id)
    assert clusters == streams
    assert sorted(solid) == sorted(edges(graph))
    queued = {pair for ids in streams.values() for pair in pairwise(ids)}
    assert set(dotted) == queued - set(edges(graph))


def test_an_edge_taken_away_is_no_longer_drawn():
    graph = forward(2)
    assert '  "completion[1]" -> "attend[1]";' in to_dot(graph)
    assert '"completion[1]" -> "attend[1]"' not in to_dot(changed(graph, "attend[1]", after=()))


def test_a_broadcast_says_owner_and_bytes():
    assert r'label="broadcast[0]\nowner 0, 40 bytes\nreads persistent[0]"' in to_dot(forward(2))


def test_what_issues_collectives_of_other_groups_says_so():
    line = r'"prologue" [shape=box, label="prologue\ncollectives of engine"]'
    assert line in to_dot(forward(2))
    assert line not in to_dot(forward(2, ranks=1))


def test_the_critical_path_has_a_double_border_and_no_other_node_has():
    dot = to_dot(forward(3), ["broadcast[1]", "attend[1]"])
    marked = [line.split('"')[1] for line in dot.splitlines() if "peripheries=2, penwidth=2];" in line]
    assert sorted(marked) == ["attend[1]", "broadcast[1]"]
    assert dot.replace(", peripheries=2, penwidth=2", "") == to_dot(forward(3))


def test_a_critical_path_of_another_graph_is_refused():
    with pytest.raises(GraphError, match=r"names 'attend\[3\]', which the graph does not have"):
        to_dot(forward(3), ["attend[3]"])

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given

from kvpp_dag.errors import GraphError
from kvpp_dag.graph import Policy
from kvpp_dag.trace.svg import to_svg
from tests.builders import changed, edges, forward
from tests.graph.graph_strategies import graphs

SVG = "{http://www.w3.org/2000/svg}"


def _nodes(svg):
    return {g.get("data-node"): g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("data-node")}


def _edges(svg):
    return [p for p in ET.fromstring(svg).iter(f"{SVG}path") if p.get("data-from")]


def _box(node):
    rect = node.find(f"{SVG}rect")
    x, y, width = (float(rect.get(name)) for name in ("x", "y", "width"))
    return x, y, x + width


@given(graphs())
def test_every_node_and_explicit_edge_is_drawn_once(graph):
    svg = to_svg(graph)
    assert list(_nodes(svg)) == [node.id for node in graph.nodes]
    drawn = [(edge.get("data-from"), edge.get("data-to")) for edge in _edges(svg)]
    assert sorted(drawn) == sorted(edges(graph))


@pytest.mark.parametrize("policy", list(Policy))
def test_a_lane_holds_the_nodes_of_a_stream_in_issue_order_without_overlap(policy):
    graph = forward(7, 2, policy=policy)
    boxes = {name: _box(node) for name, node in _nodes(to_svg(graph)).items()}
    heights = {}
    for stream in ("compute", "transfer"):
        lane = [boxes[node.id] for node in graph.nodes if node.stream == stream]
        (heights[stream],) = {y for _, y, _ in lane}
        assert all(left[2] < right[0] for left, right in pairwise(lane))
    assert heights["compute"] < heights["transfer"]
    for before, after in edges(graph):
        assert boxes[before][2] < boxes[after][0]


def test_the_critical_path_is_marked_by_more_than_colour():
    path = ["broadcast[0]", "completion[0]", "attend[0]"]
    svg = to_svg(forward(3), path)
    marked = [name for name, node in _nodes(svg).items() if "critical" in node.get("class").split()]
    assert marked == path
    thick = [(e.get("data-from"), e.get("data-to")) for e in _edges(svg) if "critical" in e.get("class")]
    assert thick == list(pairwise(path))
    assert ".critical .mark{display:inline}" in svg
    assert ".critical rect{stroke:var(--g-mark);stroke-width:3}" in svg
    assert 'class="compute critical"' not in to_svg(forward(3))


def test_a_critical_path_of_another_graph_is_refused():
    with pytest.raises(GraphError, match=r"names 'attend\[7\]', which the graph does not have"):
        to_svg(forward(3), ["attend[7]"])


def test_the_picture_has_a_title_a_description_and_what_a_node_is():
    svg = to_svg(forward(3, rank=1))
    root = ET.fromstring(svg)
    labels = root.get("aria-labelledby").split()
    assert root.get("role") == "img"
    texts = [e.text for e in root.iter() if e.get("id") in labels]
    assert texts[0] == "Graph of a forward of rank 1"
    assert "13 nodes in 2 streams" not in texts[1]
    assert f"{len(forward(3).nodes)} nodes in 2 streams" in texts[1]
    about = _nodes(svg)["broadcast[0]"].find(f"{SVG}title").text
    assert about == "broadcast[0], owner 0, slot 0, 40 bytes, writes scratch[0]"


def test_the_width_grows_with_the_layers_and_holds_every_node():
    widths = {}
    for layers in (2, 128):
        svg = to_svg(forward(layers))
        widths[layers] = float(ET.fromstring(svg).get("width"))
        assert max(_box(node)[2] for node in _nodes(svg).values()) <= widths[layers]
    assert widths[128] > 40 * widths[2]


def test_nodes_that_wait_for_each_other_are_drawn_too():
    graph = changed(forward(2), "ready[0]", after=("attend[1]",))
    assert ("attend[1]", "ready[0]") in [
        (e.get("data-from"), e.get("data-to")) for e in _edges(to_svg(graph))
    ]

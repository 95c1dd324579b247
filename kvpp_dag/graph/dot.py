"""The Graphviz form of a graph: a cluster per stream, stream order dotted, edges solid."""

from collections.abc import Iterable
from itertools import pairwise

from kvpp_dag.errors import GraphError
from kvpp_dag.graph.nodes import Graph, Kind, Node

_SHAPES = {
    Kind.COMPUTE: "box",
    Kind.BROADCAST: "box3d",
    Kind.COPY: "cds",
    Kind.READY: "ellipse",
    Kind.COMPLETION: "ellipse",
}
_CRITICAL = ", peripheries=2, penwidth=2"


def to_dot(graph: Graph, critical_path: Iterable[str] = ()) -> str:
    """Write `graph` for `dot -Tsvg`; every name is quoted and escaped.

    Nodes of `critical_path` get a double, thick border. Raises GraphError if it names an unknown node.
    """
    critical = critical_nodes(graph, critical_path)
    lines = ["digraph kvpp {", "  rankdir=LR;", '  node [fontname="Helvetica"];']
    streams = dict.fromkeys(node.stream for node in graph.nodes)
    for number, stream in enumerate(streams):
        nodes = [node for node in graph.nodes if node.stream == stream]
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quote(stream)};"]
        marks = [_CRITICAL if node.id in critical else "" for node in nodes]
        lines += [
            f"    {_quote(n.id)} [shape={_SHAPES[n.kind]}, label={_label(n)}{mark}];"
            for n, mark in zip(nodes, marks, strict=True)
        ]
        lines += [
            f"    {_quote(a.id)} -> {_quote(b.id)} [style=dotted];"
            for a, b in pairwise(nodes)
            if a.id not in b.after
        ]
        lines.append("  }")
    lines += [
        f"  {_quote(before)} -> {_quote(node.id)};" for node in graph.nodes for before in node.after
    ]
    return "\n".join([*lines, "}"]) + "\n"


def critical_nodes(graph: Graph, critical_path: Iterable[str]) -> frozenset[str]:
    """The ids of a critical path. Raises GraphError if the graph lacks one of them."""
    critical = frozenset(critical_path)
    for name in critical:
        if name not in graph.position:
            raise GraphError(f"The critical path names {name[:80]!r}, which the graph does not have.")
    return critical


def _label(node: Node) -> str:
    parts = [node.id]
    if node.kind is Kind.BROADCAST:
        parts.append(f"owner {node.owner}, {node.bytes} bytes")
    parts += [f"collectives of {group}" for group in node.collectives]
    parts += [f"reads {b}" for b in node.reads] + [f"writes {b}" for b in node.writes]
    return _quote("\n".join(parts))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

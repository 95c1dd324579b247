"""The Graphviz form of a graph: a cluster per stream, stream order dotted, edges solid."""

from itertools import pairwise

from kvpp_dag.graph.nodes import Graph, Kind, Node

_SHAPES = {
    Kind.COMPUTE: "box",
    Kind.BROADCAST: "box3d",
    Kind.READY: "ellipse",
    Kind.COMPLETION: "ellipse",
}


def to_dot(graph: Graph) -> str:
    """Write `graph` for `dot -Tsvg`; every name is quoted and escaped."""
    lines = ["digraph kvpp {", "  rankdir=LR;", '  node [fontname="Helvetica"];']
    streams = dict.fromkeys(node.stream for node in graph.nodes)
    for number, stream in enumerate(streams):
        nodes = [node for node in graph.nodes if node.stream == stream]
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quote(stream)};"]
        lines += [f"    {_quote(n.id)} [shape={_SHAPES[n.kind]}, label={_label(n)}];" for n in nodes]
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


def _label(node: Node) -> str:
    parts = [node.id]
    if node.kind is Kind.BROADCAST:
        parts.append(f"owner {node.owner}, {node.bytes} bytes")
    parts += [f"reads {b}" for b in node.reads] + [f"writes {b}" for b in node.writes]
    return _quote("\n".join(parts))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

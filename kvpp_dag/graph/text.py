"""The text form of a graph: one node a line, written and read back without loss.

    # kvpp graph rank=1 ranks=2 layout=2b1c... history=true policy=on_acquire depth=1
    broadcast[12] owner=3 slot=0 bytes=1310720 writes=scratch[0] after ready[12],broadcast[11]

A label says kind, stream and layer (`ready[i]`, `broadcast[i]`, `completion[i]`, else compute); they
are written out where they differ from what the label says.
"""

import re
from collections.abc import Callable
from typing import Any

from kvpp_dag.errors import DumpError, GraphError
from kvpp_dag.graph.nodes import (
    COMPUTE_STREAM,
    MAX_NODES,
    TRANSFER_STREAM,
    Graph,
    Kind,
    Node,
    Policy,
    check_node,
)
from kvpp_dag.graph.reading import check_size

MAX_LINES = 2 * MAX_NODES
_HEADER = "# kvpp graph "
_LABEL = re.compile(r"(?P<name>[^\[]*)(\[(?P<layer>[0-9]{1,9})\])?")


def to_text(graph: Graph) -> str:
    """Write `graph`, one node a line after a header line."""
    header = (
        f"{_HEADER}rank={graph.rank} ranks={graph.ranks} layout={graph.layout_hash or '-'} "
        f"history={str(graph.history).lower()} policy={graph.policy} depth={graph.depth}"
    )
    return "\n".join([header, *(_line(graph, node) for node in graph.nodes)]) + "\n"


def from_text(text: str) -> Graph:
    """Read what `to_text` wrote. Raises DumpError naming the line that cannot be read."""
    check_size(text)
    lines = text.splitlines()
    if not lines or not lines[0].startswith(_HEADER):
        raise DumpError(f"Line 1 is not a graph header; expected it to start with {_HEADER!r}.")
    header = _fields(lines[0].removeprefix(_HEADER).split(), 1)
    nodes = _nodes(lines)
    try:
        layout = header.pop("layout")
        graph = Graph(
            nodes=nodes,
            rank=int(header.pop("rank")),
            ranks=int(header.pop("ranks")),
            layout_hash="" if layout == "-" else layout,
            history=_boolean(header.pop("history")),
            policy=Policy(header.pop("policy")),
            depth=int(header.pop("depth")),
        )
    except KeyError as error:
        raise DumpError(f"Line 1 lacks the field {error}.") from error
    except (ValueError, GraphError) as error:
        raise DumpError(f"Line 1: {error}") from error
    if header:
        raise DumpError(f"Line 1: unknown field {next(iter(header))!r}.")
    return graph


def _nodes(lines: list[str]) -> tuple[Node, ...]:
    """The nodes on the lines after the header, each checked so that an error names its line."""
    if len(lines) > MAX_LINES:
        raise DumpError(f"Line {MAX_LINES}: a dump of more than {MAX_LINES} lines is not read.")
    nodes = {i: _node(line, i) for i, line in enumerate(lines[1:], 2) if line.strip()}
    ids: dict[str, int] = {}
    for number, node in nodes.items():
        if ids.setdefault(node.id, number) != number:
            raise DumpError(
                f"Line {number}: node id {node.id[:80]!r} is that of line {ids[node.id]} already."
            )
    for number, node in nodes.items():
        try:
            check_node(node, ids)
        except GraphError as error:
            raise DumpError(f"Line {number}: {error}") from error
    return tuple(nodes.values())


def _defaults(node_id: str) -> tuple[Kind, str, int | None]:
    """Kind, stream and layer that a label stands for."""
    match = _LABEL.match(node_id)
    name = match["name"] if match else node_id
    layer = int(match["layer"]) if match and match["layer"] else None
    match name:
        case "ready":
            return Kind.READY, COMPUTE_STREAM, layer
        case "broadcast":
            return Kind.BROADCAST, TRANSFER_STREAM, layer
        case "completion":
            return Kind.COMPLETION, TRANSFER_STREAM, layer
        case _:
            return Kind.COMPUTE, COMPUTE_STREAM, layer


def _line(graph: Graph, node: Node) -> str:
    kind, stream, layer = _defaults(node.id)
    words = [node.id]
    if node.kind is not kind:
        words.append(f"kind={node.kind}")
    if node.stream != stream:
        words.append(f"stream={node.stream}")
    if node.layer != layer:
        words.append(f"layer={'none' if node.layer is None else node.layer}")
    for name, value in (("owner", node.owner), ("slot", node.slot), ("bytes", node.bytes or None)):
        if value is not None:
            words.append(f"{name}={value}")
    named = (("collectives", node.collectives), ("reads", node.reads), ("writes", node.writes))
    words += [f"{name}={','.join(names)}" for name, names in named if names]
    if node.after:
        other = [name for name in node.after if graph[name].stream != node.stream]
        same = [name for name in node.after if graph[name].stream == node.stream]
        words += ["after", ",".join(other + same)]
    return " ".join(words)


def _node(line: str, number: int) -> Node:
    words = line.split()
    node_id, rest = words[0], words[1:]
    after: tuple[str, ...] = ()
    if "after" in rest:
        place = rest.index("after")
        if len(rest) != place + 2:
            raise DumpError(
                f"Line {number}: expected one comma-separated list at the end, after 'after'."
            )
        after = tuple(rest[place + 1].split(","))
        rest = rest[:place]
    kind, stream, layer = _defaults(node_id)
    fields = _fields(rest, number)
    take = _taker(fields, number)
    node = Node(
        id=node_id,
        kind=take("kind", Kind, kind),
        stream=take("stream", str, stream),
        layer=take("layer", lambda v: None if v == "none" else int(v), layer),
        owner=take("owner", int, None),
        slot=take("slot", int, None),
        bytes=take("bytes", int, 0),
        collectives=take("collectives", lambda v: tuple(v.split(",")), ()),
        reads=take("reads", lambda v: tuple(v.split(",")), ()),
        writes=take("writes", lambda v: tuple(v.split(",")), ()),
        after=after,
    )
    if fields:
        raise DumpError(f"Line {number}: unknown field {next(iter(fields))!r} of node {node_id!r}.")
    return node


def _taker(fields: dict[str, str], number: int) -> Callable[[str, Callable[[str], Any], Any], Any]:
    """A function that removes a field and converts it, or returns a default."""

    def take(name: str, convert: Callable[[str], Any], default: Any) -> Any:
        if name not in fields:
            return default
        value = fields.pop(name)
        try:
            return convert(value)
        except ValueError as error:
            raise DumpError(f"Line {number}: {name}={value} cannot be read: {error}.") from error

    return take


def _fields(words: list[str], number: int) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or name in fields:
            raise DumpError(f"Line {number}: {word!r} is not a name=value field, or repeats one.")
        fields[name] = value
    return fields


def _boolean(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError(f"history={value} is neither true nor false")
    return value == "true"

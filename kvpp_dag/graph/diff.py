"""What differs between two graphs: settings, nodes, edges, fields of nodes, and order on a stream."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvpp_dag.graph.nodes import Graph

SETTINGS = ("rank", "ranks", "layout_hash", "history", "policy", "depth")
_FIELDS = ("kind", "stream", "layer", "owner", "slot", "bytes", "collectives")
_BUFFERS = ("reads", "writes")

Value = str | int | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting, or `field` of node `node`, that is `a` in one dump and `b` in the other."""

    field: str
    a: Value
    b: Value
    node: str | None = None


@dataclass(frozen=True, kw_only=True)
class Move:
    """On `stream`, `node` comes right after `a` in one graph and after `b` in the other; None is the begin."""

    node: str
    stream: str
    a: str | None
    b: str | None


@dataclass(frozen=True, kw_only=True)
class GraphDiff:
    """Differences of two graphs, A and B. Edges are (before, after).

    `moves` are as few nodes as have to be put elsewhere on their stream to turn the order of A into that of B.
    """

    settings: tuple[Change, ...] = ()
    nodes_only_a: tuple[str, ...] = ()
    nodes_only_b: tuple[str, ...] = ()
    edges_only_a: tuple[tuple[str, str], ...] = ()
    edges_only_b: tuple[tuple[str, str], ...] = ()
    changes: tuple[Change, ...] = ()
    moves: tuple[Move, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self == GraphDiff()


def diff_graphs(a: Graph, b: Graph) -> GraphDiff:
    """Compare two graphs by node id.

    Two ranks find the same layer in different buffers, so buffers are compared only within one rank.
    """
    edges_a, edges_b = _edges(a), _edges(b)
    return GraphDiff(
        settings=tuple(changes_of(a, b, SETTINGS)),
        nodes_only_a=tuple(node.id for node in a.nodes if node.id not in b.position),
        nodes_only_b=tuple(node.id for node in b.nodes if node.id not in a.position),
        edges_only_a=tuple(edge for edge in edges_a if edge not in edges_b),
        edges_only_b=tuple(edge for edge in edges_b if edge not in edges_a),
        changes=tuple(_changes(a, b)),
        moves=tuple(_moves(a, b)),
    )


def changes_of(a: object, b: object, fields: Sequence[str], node: str | None = None) -> list[Change]:
    """The `fields` of two objects that differ."""
    values = [(field, _plain(getattr(a, field)), _plain(getattr(b, field))) for field in fields]
    return [Change(field=f, a=left, b=right, node=node) for f, left, right in values if left != right]


def _plain(value: object) -> Value:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if value is None or isinstance(value, int) else str(value)


def _edges(graph: Graph) -> dict[tuple[str, str], None]:
    return dict.fromkeys((before, node.id) for node in graph.nodes for before in node.after)


def _changes(a: Graph, b: Graph) -> list[Change]:
    fields = (*_FIELDS, *(_BUFFERS if a.rank == b.rank else ()))
    common = [node for node in a.nodes if node.id in b.position]
    return [change for node in common for change in changes_of(node, b[node.id], fields, node.id)]


def _moves(a: Graph, b: Graph) -> list[Move]:
    moves = []
    for stream in dict.fromkeys(node.stream for node in a.nodes):
        order_a = _order(a, stream, b)
        order_b = _order(b, stream, a)
        kept = _longest_increasing([b.position[node] for node in order_a])
        before_a = dict(zip(order_a, [None, *order_a], strict=False))
        before_b = dict(zip(order_b, [None, *order_b], strict=False))
        moves += [
            Move(node=node, stream=stream, a=before_a[node], b=before_b[node])
            for node in order_a
            if b.position[node] not in kept
        ]
    return moves


def _order(graph: Graph, stream: str, other: Graph) -> list[str]:
    """The nodes of `stream` in order, of those that are on it in both graphs."""
    return [
        node.id
        for node in graph.nodes
        if node.stream == stream and node.id in other.position and other[node.id].stream == stream
    ]


def _longest_increasing(numbers: Sequence[int]) -> set[int]:
    """The members of a longest increasing subsequence of distinct numbers (patience sorting).

    It goes from the end, so that of two neighbours that changed places the one now earlier has moved: policies
    differ in that transfers are issued earlier.
    """
    tops: list[int] = []
    under: dict[int, int | None] = {}
    for number in reversed(numbers):
        pile = bisect_left(tops, -number)
        under[number] = -tops[pile - 1] if pile else None
        tops[pile : pile + 1] = [-number]
    kept = set()
    member = -tops[-1] if tops else None
    while member is not None:
        kept.add(member)
        member = under[member]
    return kept

"""Nodes and graphs: one forward of one rank as data.

A node runs on a stream and touches buffers. What runs before what follows from two things: the edges
(`Node.after`) and stream order, since a stream is a queue and nodes of one stream run in the order in
which the graph lists them.
"""

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from kvpp_dag.errors import GraphError

COMPUTE_STREAM = "compute"
TRANSFER_STREAM = "transfer"

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,199}(\[[0-9]{1,9}\])?")
"""What ids, streams and buffers may look like; it keeps the text form unambiguous."""

LAYOUT_HASH = re.compile(r"[A-Za-z0-9_.]{0,64}")

SCRATCH = "scratch["
"""Prefix of buffers whose content belongs to one layer of one forward."""


class Kind(StrEnum):
    """What a node does."""

    READY = "ready"
    BROADCAST = "broadcast"
    COMPLETION = "completion"
    COMPUTE = "compute"


class Policy(StrEnum):
    """When the next transfer may start.

    `on_acquire`: when layer i is acquired, layer i + depth is queued; as the transfer stream is a
    queue, it starts no earlier than layer i's own transfer has ended. `on_release`: right after the
    attention that last read a slot, the next layer of that slot starts.
    """

    ON_ACQUIRE = "on_acquire"
    ON_RELEASE = "on_release"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node; `id` is equal on every rank.

    `layer` is the ordinal the node belongs to, None outside any layer. `owner`, `slot` and `bytes`
    describe a broadcast: owner rank, scratch slot of the others, payload size.
    """

    id: str
    kind: Kind
    stream: str
    after: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    layer: int | None = None
    owner: int | None = None
    slot: int | None = None
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The nodes of one forward on one rank, in issue order.

    `after` of every node is kept in issue order, so equal graphs compare equal however they were
    written. Raises GraphError for duplicate ids, unknown predecessors, malformed names and numbers
    out of range.
    """

    nodes: tuple[Node, ...]
    rank: int = 0
    ranks: int = 1
    layout_hash: str = ""
    history: bool = True
    policy: Policy = Policy.ON_ACQUIRE
    depth: int = 1

    def __post_init__(self) -> None:
        position = self.position
        if len(position) != len(self.nodes):
            twice = next(n.id for i, n in enumerate(self.nodes) if position[n.id] != i)
            raise GraphError(f"Node id {twice!r} occurs twice; ids must be unique in a graph.")
        if not 0 <= self.rank < self.ranks:
            raise GraphError(f"Rank {self.rank} is not one of the {self.ranks} ranks of its group.")
        if self.depth < 1:
            raise GraphError(f"The prefetch depth is {self.depth}; expected 1 or more.")
        if not LAYOUT_HASH.fullmatch(self.layout_hash):
            raise GraphError(
                f"The layout hash is {self.layout_hash[:80]!r}; expected up to 64 letters and digits."
            )
        for node in self.nodes:
            check_node(node, position)
        if any(len(node.after) > 1 for node in self.nodes):
            object.__setattr__(self, "nodes", tuple(_sorted(n, position) for n in self.nodes))

    @cached_property
    def position(self) -> dict[str, int]:
        """Issue position of every node id."""
        return {node.id: i for i, node in enumerate(self.nodes)}

    def __getitem__(self, node_id: str) -> Node:
        """The node of that id. Raises KeyError if there is none."""
        return self.nodes[self.position[node_id]]

    @property
    def broadcasts(self) -> tuple[Node, ...]:
        """The broadcast nodes, in issue order."""
        return tuple(node for node in self.nodes if node.kind is Kind.BROADCAST)


def check_node(node: Node, ids: Container[str]) -> None:
    """Raise GraphError if `node` cannot be part of a graph with these node ids."""
    for name in (node.id, node.stream, *node.reads, *node.writes):
        if not NAME.fullmatch(name):
            raise GraphError(
                f"Node {node.id[:80]!r} uses the name {name[:80]!r}; names start with a letter, "
                "hold letters, digits and _.:/-, and may end with an index such as [12]."
            )
    numbers = {"layer": node.layer, "owner": node.owner, "slot": node.slot, "bytes": node.bytes}
    for field, value in numbers.items():
        if value is not None and value < 0:
            raise GraphError(f"Node {node.id!r} has {field} {value}; expected 0 or more.")
    for other in node.after:
        if other not in ids:
            raise GraphError(f"Node {node.id!r} comes after {other[:80]!r}, which does not exist.")
    if node.id in node.after:
        raise GraphError(f"Node {node.id!r} comes after itself.")


def _sorted(node: Node, position: dict[str, int]) -> Node:
    """`node` with its predecessors in issue order and without repetition."""
    after = tuple(sorted(set(node.after), key=position.__getitem__))
    return node if after == node.after else replace(node, after=after)


def without_edge(graph: Graph, before: str, after: str) -> Graph:
    """A copy of `graph` without the edge from `before` to `after`.

    Raises GraphError if there is no such edge.
    """
    if before not in graph[after].after:
        raise GraphError(f"The graph has no edge from {before!r} to {after!r}.")
    kept = tuple(n for n in graph[after].after if n != before)
    nodes = tuple(replace(n, after=kept) if n.id == after else n for n in graph.nodes)
    return replace(graph, nodes=nodes)

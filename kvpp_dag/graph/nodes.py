"""Nodes and graphs: one forward of one rank as data.

A node runs on a stream and touches buffers. What runs before what follows from two things: the edges
(`Node.after`) and stream order, since a stream is a queue and nodes of one stream run in the order in
which the graph lists them.
"""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain, pairwise

from kvpp_dag.errors import GraphError

COMPUTE_STREAM = "compute"
TRANSFER_STREAM = "transfer"
COPY_STREAM = "copy"

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,199}(\[[0-9]{1,9}\])?")
"""What ids, streams and buffers may look like; it keeps the text form unambiguous."""

LAYOUT_HASH = re.compile(r"[A-Za-z0-9_.]{0,64}")

MAX_NODES = 20_000
"""Nodes of a graph; a proof holds the order of two forwards, about 200 MB for that many."""

MAX_BUFFERS = 256
"""Buffers that one node may read, and that it may write."""

MAX_GROUPS = 32
"""Groups of communication that one node may name."""

MAX_RANKS = 1 << 20
MAX_NUMBER = (1 << 64) - 1
"""Largest layer, owner, slot, depth or byte count; larger ones are no sizes of anything."""

SCRATCH = "scratch["
"""Prefix of buffers whose content belongs to one layer of one forward."""

STAGING = "staging["
"""Prefix of the halves through which packed blocks travel; what they hold is as short-lived."""


KVPP_GROUP = "kvpp"
"""The group of communication of every broadcast."""

ENGINE_GROUP = "engine"
"""The engine's own groups, taken together: what they do within one compute node, the engine itself orders."""


class Kind(StrEnum):
    """What a node does."""

    READY = "ready"
    BROADCAST = "broadcast"
    COMPLETION = "completion"
    COMPUTE = "compute"
    COPY = "copy"


EVENTS = (Kind.READY, Kind.COMPLETION)
"""Kinds of nodes that take no time: points of a stream."""

TRANSFERS = (Kind.BROADCAST, Kind.COPY)
"""Kinds of nodes that move bytes."""


class Policy(StrEnum):
    """When the next transfer may start.

    `on_acquire`: when layer i is acquired, layer i + depth is queued; as the transfer stream is a
    queue, it starts no earlier than layer i's own transfer has ended. `on_release`: right after the
    attention that last read a slot, the next layer of that slot starts.
    """

    ON_ACQUIRE = "on_acquire"
    ON_RELEASE = "on_release"


@dataclass(frozen=True, kw_only=True, init=False)
class Node:
    """One node; `id` is equal on every rank.

    `layer` is the ordinal the node belongs to, None outside any layer. `owner`, `slot` and `bytes`
    describe a broadcast: owner rank, scratch slot of the others, payload size. `collectives` are the groups
    of communication to which another node gives work, in that order; a broadcast gives it to the KVPP group.
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
    collectives: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        id: str,
        kind: Kind,
        stream: str,
        after: tuple[str, ...] = (),
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        layer: int | None = None,
        owner: int | None = None,
        slot: int | None = None,
        bytes: int = 0,
        collectives: tuple[str, ...] = (),
    ) -> None:
        # As a frozen dataclass would, which takes twice as long over it: half the time of building a graph.
        fields: dict[str, object] = self.__dict__
        fields["id"] = id
        fields["kind"] = kind
        fields["stream"] = stream
        fields["after"] = after
        fields["reads"] = reads
        fields["writes"] = writes
        fields["layer"] = layer
        fields["owner"] = owner
        fields["slot"] = slot
        fields["bytes"] = bytes
        fields["collectives"] = collectives

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups whose collectives this node issues; nothing for most nodes."""
        return (KVPP_GROUP,) if self.kind is Kind.BROADCAST else self.collectives


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
        if len(self.nodes) > MAX_NODES:
            raise GraphError(f"The graph has {len(self.nodes)} nodes; expected at most {MAX_NODES}.")
        position = self.position
        if len(position) != len(self.nodes):
            twice = next(n.id for i, n in enumerate(self.nodes) if position[n.id] != i)
            raise GraphError(f"Node id {twice!r} occurs twice; ids must be unique in a graph.")
        if not 0 <= self.rank < self.ranks:
            raise GraphError(f"Rank {self.rank} is not one of the {self.ranks} ranks of its group.")
        if self.ranks > MAX_RANKS:
            raise GraphError(f"The group has more than {MAX_RANKS} ranks; expected fewer.")
        if self.depth < 1:
            raise GraphError(f"The prefetch depth is {self.depth}; expected 1 or more.")
        if self.depth > MAX_NUMBER:
            raise GraphError(f"The prefetch depth is above {MAX_NUMBER}; expected less.")
        if not LAYOUT_HASH.fullmatch(self.layout_hash):
            raise GraphError(
                f"The layout hash is {self.layout_hash[:80]!r}; expected up to 64 letters and digits."
            )
        if not _plainly_sound(self.nodes, position):
            for node in self.nodes:
                check_node(node, position)
        pairs = (pair for node in self.nodes if len(node.after) > 1 for pair in pairwise(node.after))
        if any(position[a] >= position[b] for a, b in pairs):
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

    @property
    def issued(self) -> tuple[Node, ...]:
        """The nodes that issue collectives of any group, in issue order."""
        return tuple(node for node in self.nodes if node.kind is Kind.BROADCAST or node.collectives)


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """What one rank issues in a forward, in issue order: broadcasts, and collectives of other groups."""

    rank: int
    ranks: int
    layout_hash: str
    issued: tuple[Node, ...]


def check_node(node: Node, ids: Container[str]) -> None:
    """Raise GraphError if `node` cannot be part of a graph with these node ids."""
    for name in (node.id, node.stream, *node.reads, *node.writes, *node.collectives):
        if not NAME.fullmatch(name):
            raise GraphError(
                f"Node {node.id[:80]!r} uses the name {name[:80]!r}; names start with a letter, "
                "hold letters, digits and _.:/-, and may end with an index such as [12]."
            )
    if max(len(node.reads), len(node.writes)) > MAX_BUFFERS:
        raise GraphError(f"Node {node.id!r} uses more than {MAX_BUFFERS} buffers; expected fewer.")
    if len(node.collectives) > MAX_GROUPS:
        raise GraphError(f"Node {node.id!r} names more than {MAX_GROUPS} groups; expected fewer.")
    if node.collectives and (node.kind is Kind.BROADCAST or KVPP_GROUP in node.collectives):
        raise GraphError(
            f"Node {node.id!r} names collectives of {', '.join(node.collectives)}; only a broadcast is one of "
            f"group {KVPP_GROUP!r}, and it names no group."
        )
    numbers = {"layer": node.layer, "owner": node.owner, "slot": node.slot, "bytes": node.bytes}
    for field, value in numbers.items():
        if value is not None and value < 0:
            raise GraphError(f"Node {node.id!r} has {field} {value}; expected 0 or more.")
        if value is not None and value > MAX_NUMBER:
            raise GraphError(f"Node {node.id!r} has {field} above {MAX_NUMBER}; expected less.")
    for other in node.after:
        if other not in ids:
            raise GraphError(f"Node {node.id!r} comes after {other[:80]!r}, which does not exist.")
    if node.id in node.after:
        raise GraphError(f"Node {node.id!r} comes after itself.")


def _plainly_sound(nodes: Sequence[Node], ids: Mapping[str, int]) -> bool:
    """Whether `check_node` has nothing to say, from one look at all nodes together: a graph repeats its names."""
    uses = {n.reads for n in nodes} | {n.writes for n in nodes}
    groups = {n.collectives for n in nodes}
    names = {n.stream for n in nodes}.union(ids, *uses, *groups)
    places = {n.layer for n in nodes} | {n.slot for n in nodes}
    numbers = places | {n.owner for n in nodes} | {n.bytes for n in nodes}
    before = set(chain.from_iterable([n.after for n in nodes]))
    return (
        all(map(NAME.fullmatch, names))
        and all(len(buffers) <= MAX_BUFFERS for buffers in uses)
        and all(len(named) <= MAX_GROUPS and KVPP_GROUP not in named for named in groups)
        and not any(n.collectives for n in nodes if n.kind is Kind.BROADCAST)
        and all(0 <= n <= MAX_NUMBER for n in numbers if n is not None)
        and before <= ids.keys()
        and not any(n.id in n.after for n in nodes)
    )


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

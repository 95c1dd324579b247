"""The JSON form of a graph: networkx node-link data under `graph`, beside what identifies the rank.

`networkx.node_link_graph(dump["graph"])` opens it. Node order in the file is issue order, from which
stream order follows, so stream order is not repeated as edges.
"""

import json
from typing import Annotated, Any

import networkx as nx
from pydantic import BaseModel, ConfigDict, FailFast, Field

from kvpp_dag.errors import DumpError, GraphError
from kvpp_dag.graph.nodes import MAX_NODES, Graph, Kind, Node, Policy, check_node
from kvpp_dag.graph.reading import check_size, read_model

SCHEMA_VERSION = 2
READ_VERSIONS = (1, 2)
"""Version 1 had no `collectives`: what it holds reads as nodes that issue none but broadcasts."""
MAX_EDGES = 20 * MAX_NODES


def to_networkx(graph: Graph) -> "nx.DiGraph[str]":
    """The graph with its explicit edges; every node carries its fields as attributes."""
    result: nx.DiGraph[str] = nx.DiGraph()
    for node in graph.nodes:
        result.add_node(
            node.id,
            kind=str(node.kind),
            stream=node.stream,
            layer=node.layer,
            owner=node.owner,
            slot=node.slot,
            bytes=node.bytes,
            reads=list(node.reads),
            writes=list(node.writes),
            collectives=list(node.collectives),
        )
    result.add_edges_from((before, node.id) for node in graph.nodes for before in node.after)
    return result


def to_dump(graph: Graph) -> dict[str, Any]:
    """`graph` as the plain data of its JSON form."""
    return {
        "schema_version": SCHEMA_VERSION,
        "layout_hash": graph.layout_hash,
        "rank": graph.rank,
        "ranks": graph.ranks,
        "history": graph.history,
        "policy": str(graph.policy),
        "depth": graph.depth,
        "graph": nx.node_link_data(to_networkx(graph), edges="edges"),
    }


def to_json(graph: Graph) -> str:
    """Write `graph` as indented JSON."""
    return json.dumps(to_dump(graph), indent=1) + "\n"


class _DumpNode(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    id: str
    kind: Kind
    stream: str
    layer: int | None = Field(default=None, ge=0)
    owner: int | None = Field(default=None, ge=0)
    slot: int | None = Field(default=None, ge=0)
    bytes: int = Field(default=0, ge=0)
    reads: Annotated[list[str], FailFast()] = []
    writes: Annotated[list[str], FailFast()] = []
    collectives: Annotated[list[str], FailFast()] = []


class _DumpEdge(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    source: str
    target: str


class _DumpGraph(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    nodes: Annotated[list[_DumpNode], FailFast()] = Field(max_length=MAX_NODES)
    edges: Annotated[list[_DumpEdge], FailFast()] = Field(max_length=MAX_EDGES)


class GraphDump(BaseModel):
    """A graph as the plain data of its JSON form, read but not yet checked as a graph."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: int
    layout_hash: str
    rank: int
    ranks: int
    history: bool
    policy: Policy
    depth: int = Field(ge=1)
    graph: _DumpGraph


def from_json(text: str) -> Graph:
    """Read what `to_json` wrote. Raises DumpError naming the place that cannot be read."""
    check_size(text)
    return from_dump(read_model(GraphDump, text))


def from_dump(dump: GraphDump) -> Graph:
    """The graph that `dump` describes. Raises DumpError naming the place that is wrong."""
    if dump.schema_version not in READ_VERSIONS:
        raise DumpError(
            f"At schema_version: {dump.schema_version}; this version reads "
            f"{' and '.join(map(str, READ_VERSIONS))}."
        )
    nodes = _nodes(dump.graph)
    try:
        return Graph(
            nodes=nodes,
            rank=dump.rank,
            ranks=dump.ranks,
            layout_hash=dump.layout_hash,
            history=dump.history,
            policy=dump.policy,
            depth=dump.depth,
        )
    except GraphError as error:
        raise DumpError(f"At the file: {error}") from error


def _nodes(dump: _DumpGraph) -> tuple[Node, ...]:
    """The nodes of a dump, each checked so that an error names its key path."""
    after: dict[str, list[str]] = {}
    for i, node in enumerate(dump.nodes):
        if node.id in after:
            raise DumpError(f"At graph.nodes.{i}: node id {node.id[:80]!r} occurs twice.")
        after[node.id] = []
    for i, edge in enumerate(dump.edges):
        for name in (edge.source, edge.target):
            if name not in after:
                raise DumpError(f"At graph.edges.{i}: there is no node {name[:80]!r}.")
        after[edge.target].append(edge.source)
    nodes = tuple(_node(node, after[node.id]) for node in dump.nodes)
    for i, checked in enumerate(nodes):
        try:
            check_node(checked, after)
        except GraphError as error:
            raise DumpError(f"At graph.nodes.{i}: {error}") from error
    return nodes


def _node(node: _DumpNode, after: list[str]) -> Node:
    return Node(
        id=node.id,
        kind=node.kind,
        stream=node.stream,
        after=tuple(after),
        reads=tuple(node.reads),
        writes=tuple(node.writes),
        layer=node.layer,
        owner=node.owner,
        slot=node.slot,
        bytes=node.bytes,
        collectives=tuple(node.collectives),
    )

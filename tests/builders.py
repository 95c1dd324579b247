"""Small plans and graphs for tests, with bundle sizes that differ from layer to layer."""

from dataclasses import replace

from kvpp_dag.graph import Graph, Kind, Node, Policy, build_forward
from kvpp_dag.plan import CacheSpec, Component, StagePlan, plan_stage


def spec(index, *sizes, **fields):
    """The cache spec of layer `index` with components c0, c1, ... of the given sizes."""
    components = tuple(
        Component(name=f"c{i}", bytes_per_block=size) for i, size in enumerate(sizes or (8,))
    )
    return CacheSpec(**{"layer": f"layers.{index}", "index": index, "components": components} | fields)


def specs(layers: int, *, first: int = 0) -> list[CacheSpec]:
    """Specs of consecutive layers; every third one has a second component."""
    return [spec(i, 8, 2) if i % 3 == 0 else spec(i, 8) for i in range(first, first + layers)]


def stage(layers: int, ranks: int, depth: int = 1) -> StagePlan:
    return plan_stage(specs(layers), ranks=ranks, depth=depth)


def forward(
    layers: int,
    ranks: int = 2,
    *,
    rank: int = 0,
    depth: int = 1,
    policy: Policy = Policy.ON_ACQUIRE,
    history: bool = True,
    num_blocks: int = 4,
    chunks: int = 0,
) -> Graph:
    plan = stage(layers, ranks, depth)
    return build_forward(
        plan, rank=rank, num_blocks=num_blocks, history=history, policy=policy, chunks=chunks
    )


def group(layers: int, ranks: int = 2, **settings) -> list[Graph]:
    """The same forward of every rank."""
    return [forward(layers, ranks, rank=rank, **settings) for rank in range(ranks)]


def compute(node_id: str, *, stream: str = "compute", **fields) -> Node:
    return Node(id=node_id, kind=Kind.COMPUTE, stream=stream, **fields)


def changed(graph: Graph, node_id: str, **fields) -> Graph:
    """`graph` with some fields of one node replaced."""
    return replace(
        graph, nodes=tuple(replace(n, **fields) if n.id == node_id else n for n in graph.nodes)
    )


def swapped(graph: Graph, i: int, j: int) -> Graph:
    """`graph` with the nodes at two places exchanged, and so with another stream order."""
    nodes = list(graph.nodes)
    nodes[i], nodes[j] = nodes[j], nodes[i]
    return replace(graph, nodes=tuple(nodes))


def edges(graph: Graph) -> list[tuple[str, str]]:
    return [(before, node.id) for node in graph.nodes for before in node.after]

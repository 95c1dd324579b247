"""Lower a graph to a flat program: what to do at each hook of an engine, and nothing else.

An engine owns the compute nodes and calls a hook around each: `begin` before the prologue,
`acquire(i)` before `attend[i]`, `release(i)` after it, `end` after the last one. The nodes between two
compute nodes become the steps of the hook between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpp_dag.errors import GraphError
from kvpp_dag.graph.nodes import COMPUTE_STREAM, EVENTS, Graph, Kind, Node
from kvpp_dag.graph.order import Cycle, order_of


@dataclass(frozen=True, kw_only=True)
class Wait:
    """`stream` waits for the event of that id, which another stream records."""

    stream: str
    event: str


Step = Node | Wait
"""A wait, or a node of the graph: an event to record, a broadcast or copy to launch."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The steps of one forward by hook; `acquire` and `release` are indexed by ordinal."""

    graph: Graph
    begin: tuple[Step, ...]
    acquire: tuple[tuple[Step, ...], ...]
    release: tuple[tuple[Step, ...], ...]
    end: tuple[Step, ...]

    @property
    def layers(self) -> int:
        """Number of target layers."""
        return len(self.acquire)

    @property
    def hooks(self) -> tuple[tuple[Step, ...], ...]:
        """All hooks in the order in which an engine calls them."""
        pairs = zip(self.acquire, self.release, strict=True)
        return (self.begin, *(hook for pair in pairs for hook in pair), self.end)


def lower(graph: Graph) -> Program:
    """Lower a forward's graph to its program, leaving out waits that an earlier one implies.

    Raises GraphError if the graph is not one that an engine's hooks can drive: its compute nodes must
    be a prologue, then `attend[i]` and `compute[i]` of every layer in order, and an edge between two
    streams must start at an event.
    """
    layers = _check_shape(graph)
    hooks = _Hooks(begin=[], acquire=[[] for _ in range(layers)], release=[[] for _ in range(layers)])
    pending: list[Step] = []
    computing = Kind.COMPUTE
    for node, events in zip(graph.nodes, _needed_waits(graph), strict=True):
        if events:
            pending += [Wait(stream=node.stream, event=event) for event in events]
        if node.kind is computing:
            hooks.before(node).extend(pending)
            pending = []
        else:
            pending.append(node)
    return Program(
        graph=graph,
        begin=tuple(hooks.begin),
        acquire=tuple(map(tuple, hooks.acquire)),
        release=tuple(map(tuple, hooks.release)),
        end=tuple(pending),
    )


@dataclass(kw_only=True)
class _Hooks:
    begin: list[Step]
    acquire: list[list[Step]]
    release: list[list[Step]]

    def before(self, node: Node) -> list[Step]:
        """The hook that runs right before compute node `node`."""
        if node.layer is None:
            return self.begin
        return (self.acquire if node.id.startswith("attend[") else self.release)[node.layer]


def _check_shape(graph: Graph) -> int:
    """Return the number of layers, or raise GraphError if the hooks cannot drive the graph."""
    computing = Kind.COMPUTE
    compute = [node for node in graph.nodes if node.kind is computing]
    layers = len(compute) // 2
    expected: list[tuple[str, int | None]] = [("prologue", None)]
    for i in range(layers):
        expected += [(f"attend[{i}]", i), (f"compute[{i}]", i)]
    if [(node.id, node.layer) for node in compute] != expected:
        raise GraphError(
            "An engine drives prologue, then attend[i] and compute[i] of every layer in order; this "
            f"graph computes {', '.join(n.id for n in compute[:6]) or 'nothing'}, ... Run it on the "
            "Executor."
        )
    for node in compute:
        if node.stream != COMPUTE_STREAM:
            raise GraphError(f"{node.id} is on stream {node.stream!r}; expected {COMPUTE_STREAM!r}.")
    return layers


def _needed_waits(graph: Graph) -> Iterator[list[str]]:
    """Of each node, the events that its stream still has to wait for, given what it knows to be finished.

    The latest comes first, so that it can imply the others. Sets of nodes are bits, by issue position. As every
    wait that is needed is made, what a stream knows at a node is all that runs before it.
    """
    position, nodes = graph.position, graph.nodes
    known_on: dict[str, int] = {}
    before: list[int] = []
    for place, node in enumerate(nodes):
        known = known_on.get(node.stream, 0)
        events = []
        for name in reversed(node.after):
            i = position[name]
            if i > place:
                raise GraphError(_issued_later(graph, node, name))
            if known >> i & 1:
                continue
            if nodes[i].kind not in EVENTS:
                raise GraphError(
                    f"{node.id} on stream {node.stream!r} comes after {name} on stream "
                    f"{nodes[i].stream!r}; record an event after {name} and wait for that."
                )
            events.append(name)
            known |= before[i] | 1 << i
        before.append(known)
        known_on[node.stream] = known | 1 << place
        yield events


def _issued_later(graph: Graph, node: Node, name: str) -> str:
    if isinstance(order_of((graph,)), Cycle):
        return "The graph has a cycle and cannot be lowered; verify names it."
    return (
        f"{node.id} comes after {name}, which is issued later, so its wait would find nothing recorded yet; "
        "list predecessors first."
    )

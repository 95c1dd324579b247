"""Lower a graph to a flat program: what to do at each hook of an engine, and nothing else.

An engine owns the compute nodes and calls a hook around each: `begin` before the prologue,
`acquire(i)` before `attend[i]`, `release(i)` after it, `end` after the last one. The nodes between two
compute nodes become the steps of the hook between them.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvpp_dag.errors import GraphError
from kvpp_dag.graph.nodes import COMPUTE_STREAM, EVENTS, Graph, Kind, Node
from kvpp_dag.graph.order import Cycle, order_of


class Op(StrEnum):
    """What a step does: record an event, make a stream wait for one, or launch a transfer."""

    RECORD = "record"
    WAIT = "wait"
    LAUNCH = "launch"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step on `stream`. `node` is the event recorded or waited for, or the broadcast or copy."""

    op: Op
    stream: str
    node: str


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
    waits = _Waits(graph)
    pending: list[Step] = []
    for node in graph.nodes:
        for event in waits.needed(node):
            pending.append(Step(op=Op.WAIT, stream=node.stream, node=event))
        if node.kind in EVENTS:
            pending.append(Step(op=Op.RECORD, stream=node.stream, node=node.id))
        elif node.kind in (Kind.BROADCAST, Kind.COPY):
            pending.append(Step(op=Op.LAUNCH, stream=node.stream, node=node.id))
        else:
            hooks.before(node).extend(pending)
            pending = []
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
    compute = [node for node in graph.nodes if node.kind is Kind.COMPUTE]
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


class _Waits:
    """Which events a node's stream still has to wait for, given what it knows to be finished.

    Sets of nodes are bits, by issue position. As every wait that is needed is made, what a stream knows at a
    node is all that runs before it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[str, int] = {}
        self.before: list[int] = []

    def needed(self, node: Node) -> list[str]:
        """Event ids to wait for before `node`, the latest first so that it can imply the others.

        To be asked for every node, in issue order.
        """
        position, place = self.graph.position, len(self.before)
        known = self.known.get(node.stream, 0)
        events = []
        for name in reversed(node.after):
            i = position[name]
            if i > place:
                raise GraphError(self._issued_later(node, name))
            if known >> i & 1:
                continue
            other = self.graph.nodes[i]
            if other.kind not in EVENTS:
                raise GraphError(
                    f"{node.id} on stream {node.stream!r} comes after {name} on stream "
                    f"{other.stream!r}; record an event after {name} and wait for that."
                )
            events.append(name)
            known |= self.before[i] | 1 << i
        self.before.append(known)
        self.known[node.stream] = known | 1 << place
        return events

    def _issued_later(self, node: Node, name: str) -> str:
        if isinstance(order_of((self.graph,)), Cycle):
            return "The graph has a cycle and cannot be lowered; verify names it."
        return (
            f"{node.id} comes after {name}, which is issued later, so its wait would find nothing recorded yet; "
            "list predecessors first."
        )

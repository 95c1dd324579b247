"""What runs before what: the reflexive-free ancestor sets of nodes under edges and stream order."""

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from kvpp_dag.graph.nodes import Graph


@dataclass(frozen=True, kw_only=True)
class Order:
    """The order of the nodes of consecutive forwards, numbered through in issue order.

    Bit `j` of `ancestors[i]` is set if node `j` is finished before node `i` starts, whatever the
    timing.
    """

    ancestors: tuple[int, ...]

    def ordered(self, i: int, j: int) -> bool:
        """Whether a path leads from one of the two nodes to the other."""
        return bool((self.ancestors[i] >> j | self.ancestors[j] >> i) & 1)


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Nodes that wait for each other in a ring, first one repeated at the end."""

    nodes: tuple[int, ...]


def direct_predecessors(forwards: Sequence[Graph]) -> list[list[int]]:
    """Positions right before each node: its edges, and the node before it on its stream."""
    predecessors: list[list[int]] = []
    last_on_stream: dict[str, int] = {}
    for graph in forwards:
        base, position = len(predecessors), graph.position
        for i, node in enumerate(graph.nodes, base):
            before = [base + position[name] for name in node.after]
            stream = node.stream
            if stream in last_on_stream:
                before.append(last_on_stream[stream])
            last_on_stream[stream] = i
            predecessors.append(before)
    return predecessors


def order_of(forwards: Sequence[Graph]) -> Order | Cycle:
    """The order over one or more consecutive forwards of a rank, or the ring that prevents one."""
    predecessors = direct_predecessors(forwards)
    sequence = _sequence(predecessors)
    if isinstance(sequence, Cycle):
        return sequence
    ancestors = [0] * len(predecessors)
    for i in sequence:
        mask = 0
        for j in predecessors[i]:
            mask |= ancestors[j] | 1 << j
        ancestors[i] = mask
    return Order(ancestors=tuple(ancestors))


def cycle_one_at_a_time(graph: Graph) -> Cycle | None:
    """The ring in which nodes wait if the device runs collectives one after another, as the host issues them."""
    predecessors = direct_predecessors((graph,))
    issued = [graph.position[node.id] for node in graph.issued]
    for before, then in pairwise(issued):
        predecessors[then].append(before)
    sequence = _sequence(predecessors)
    return sequence if isinstance(sequence, Cycle) else None


def _sequence(predecessors: Sequence[Sequence[int]]) -> Sequence[int] | Cycle:
    """Positions in an order that puts every node behind its predecessors."""
    if all(j < i for i, before in enumerate(predecessors) for j in before):
        return range(len(predecessors))
    try:
        return tuple(TopologicalSorter(dict(enumerate(predecessors))).static_order())
    except CycleError as error:
        return Cycle(nodes=tuple(error.args[1]))

"""Small graphs for the executor's tests, kernels that keep a ledger, and streams to run them on."""

from contextlib import contextmanager

from kvpp_dag.graph import Graph, Kind, Node
from kvpp_dag.runtime import CpuStream, State

SOON = 20.0
STREAMS = ("a", "b", "c", "d")
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED


@contextmanager
def open_streams():
    streams = {name: CpuStream(name, timeout=SOON) for name in STREAMS}
    yield streams
    for stream in streams.values():
        stream.close()


def node(name, stream, *after):
    """A compute node that writes its own buffer and reads those of its predecessors."""
    reads = tuple(f"value_{other}" for other in after)
    return Node(
        id=name, kind=Kind.COMPUTE, stream=stream, after=after, reads=reads, writes=(f"value_{name}",)
    )


def graph_of(*nodes):
    return Graph(nodes=nodes)


class Ledger:
    """Kernels that note the order in which they ran; some fail, some wait for a gate."""

    def __init__(self, graph, *, failing=(), gates=None):
        self.started = []
        self.ran = []
        self.failing = failing
        self.gates = gates or {}
        self.kernels = {n.id: lambda n=n.id: self._run(n) for n in graph.nodes}

    def _run(self, name):
        self.started.append(name)
        if name in self.gates:
            assert self.gates[name].wait(SOON)
        self.ran.append(name)
        if name in self.failing:
            raise ArithmeticError(f"{name} fell over")


DIAMOND = graph_of(
    node("top", "a"), node("l", "b", "top"), node("r", "c", "top"), node("end", "a", "l", "r")
)

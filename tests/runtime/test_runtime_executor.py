"""Any graph on streams: order, what is refused, and random graphs against a sequential run."""

import asyncio
import random
import threading

import pytest

from kvpp_dag.errors import ConfigError, NodeError, UnsoundGraphError
from kvpp_dag.graph import Kind, Node, build_forward, verify_alone, without_edge
from kvpp_dag.graph.nodes import Policy
from kvpp_dag.runtime import Executor, executor
from tests.runtime.executor_support import (
    CANCELLED,
    DIAMOND,
    DONE,
    FAILED,
    SOON,
    STREAMS,
    Ledger,
    graph_of,
    node,
    open_streams,
)
from tests.runtime_support import small_plan


@pytest.fixture
def streams():
    with open_streams() as streams:
        yield streams


async def test_a_diamond_joins_both_sides(streams):
    ledger = Ledger(DIAMOND)
    assert await Executor(streams).run(DIAMOND, ledger.kernels) == dict.fromkeys(ledger.kernels, DONE)
    assert ledger.ran[0] == "top"
    assert set(ledger.ran[1:3]) == {"l", "r"}
    assert ledger.ran[3] == "end"


async def test_both_sides_of_a_diamond_can_run_at_once(streams):
    meeting = threading.Barrier(2)
    ledger = Ledger(DIAMOND)
    kernels = ledger.kernels | {side: lambda: meeting.wait(SOON) for side in ("l", "r")}
    await Executor(streams).run(DIAMOND, kernels)
    assert ledger.ran == ["top", "end"]


async def test_a_chain_over_three_streams_runs_in_order(streams):
    names = [f"n{i}" for i in range(50)]
    nodes = [node(n, STREAMS[i % 3], *names[i - 1 : i] if i else ()) for i, n in enumerate(names)]
    ledger = Ledger(graph_of(*nodes))
    await Executor(streams).run(graph_of(*nodes), ledger.kernels)
    assert ledger.ran == names


async def test_one_stream_keeps_the_order_of_the_graph(streams):
    graph = graph_of(*[node(f"n{i}", "a") for i in range(50)])
    ledger = Ledger(graph)
    await Executor(streams).run(graph, ledger.kernels)
    assert ledger.ran == [n.id for n in graph.nodes]


async def test_a_graph_may_list_a_node_before_what_it_waits_for(streams):
    graph = graph_of(node("late", "a", "early"), node("early", "b"))
    ledger = Ledger(graph)
    await Executor(streams).run(graph, ledger.kernels)
    assert ledger.ran == ["early", "late"]


async def test_an_empty_graph_and_events_need_no_kernel(streams):
    assert await Executor(streams).run(graph_of(), {}) == {}
    event = Node(id="ready", kind=Kind.READY, stream="a")
    assert await Executor(streams).run(graph_of(event), {}) == {"ready": DONE}


async def test_a_compiled_forward_runs(streams):
    graph = build_forward(small_plan(5, 2), rank=1, num_blocks=4, history=True, policy=Policy.ON_RELEASE)
    ledger = Ledger(graph)
    kernels = {
        n.id: ledger.kernels[n.id] for n in graph.nodes if n.kind in (Kind.COMPUTE, Kind.BROADCAST)
    }
    named = {"compute": streams["a"], "transfer": streams["b"]}
    states = await Executor(named).run(graph, kernels)
    assert states == {n.id: DONE for n in graph.nodes}
    for layer in range(5):
        assert ledger.ran.index(f"broadcast[{layer}]") < ledger.ran.index(f"attend[{layer}]")


async def test_two_runs_at_once_on_the_same_streams(streams):
    ledgers = [Ledger(DIAMOND) for _ in range(8)]
    await asyncio.gather(*(Executor(streams).run(DIAMOND, ledger.kernels) for ledger in ledgers))
    assert all(ledger.ran[0] == "top" and ledger.ran[3] == "end" for ledger in ledgers)


async def test_kernels_and_streams_must_fit_the_graph(streams):
    kernels = Ledger(DIAMOND).kernels
    run = Executor(streams).run
    with pytest.raises(ConfigError, match="Node 'l' has no kernel"):
        await run(DIAMOND, {name: k for name, k in kernels.items() if name != "l"})
    with pytest.raises(
        ConfigError, match="kernel 'ghost' belongs to no compute, broadcast or copy node"
    ):
        await run(DIAMOND, kernels | {"ghost": print})
    with pytest.raises(ConfigError, match="'r' runs on stream 'c'; this executor has: a, b"):
        await Executor({name: streams[name] for name in "ab"}).run(DIAMOND, kernels)
    with pytest.raises(ConfigError, match="this executor has: none"):
        await Executor({}).run(DIAMOND, kernels)


RACY = graph_of(
    Node(id="one", kind=Kind.COMPUTE, stream="a", writes=("x",)),
    Node(id="two", kind=Kind.COMPUTE, stream="b", writes=("x",)),
)
RING = graph_of(node("one", "a", "two"), node("two", "b", "one"))


@pytest.mark.parametrize(("graph", "word"), [(RACY, "race on x"), (RING, "deadlock")])
async def test_an_unsound_graph_is_refused_before_anything_runs(streams, graph, word):
    ledger = Ledger(graph)
    with pytest.raises(UnsoundGraphError, match=word) as caught:
        await Executor(streams).run(graph, ledger.kernels)
    assert caught.value.findings
    assert ledger.ran == []


# Random graphs. Every node mixes the values of its predecessors, and appends itself to the log of its
# stream; a sequential run in the order of the graph says what must come out.


def random_graph(dice):
    streams = STREAMS[: dice.randint(1, 4)]
    nodes = []
    for i in range(dice.randint(1, 12)):
        after = [n.id for n in nodes if dice.random() < 0.25]
        nodes.append(node(f"n{i}", dice.choice(streams), *after))
    return graph_of(*nodes)


class Mixer:
    """Kernels over shared values and logs; the same ones for both kinds of run."""

    def __init__(self, graph, failing=()):
        self.values = {}
        self.logs = {stream: [] for stream in STREAMS}
        self.kernels = {n.id: lambda n=n: self._mix(n) for n in graph.nodes}
        self.failing = failing

    def _mix(self, node):
        self.logs[node.stream].append(node.id)
        if node.id in self.failing:
            raise ArithmeticError(node.id)
        self.values[node.id] = hash((node.id, *(self.values.get(other) for other in node.after)))

    def result(self):
        return self.values, self.logs


def sequential(graph, failing=()):
    """The states, values and logs that a run must end with."""
    mixer, states, last = Mixer(graph, failing), {}, {}
    for n in graph.nodes:
        before = [*n.after, *([last[n.stream]] if n.stream in last else [])]
        last[n.stream] = n.id
        if any(states[other] != DONE for other in before):
            states[n.id] = CANCELLED
            continue
        try:
            mixer.kernels[n.id]()
            states[n.id] = DONE
        except ArithmeticError:
            states[n.id] = FAILED
    return states, mixer.result()


async def outcome(run):
    """The final states, and the node that failed first."""
    try:
        return await run, None
    except NodeError as error:
        return error.states, error.node


async def test_a_thousand_random_graphs_end_as_a_sequential_run(streams):
    for seed in range(1000):
        dice = random.Random(seed)
        graph = random_graph(dice)
        failing = {n.id for n in graph.nodes if seed % 3 == 0 and dice.random() < 0.15}
        states, result = sequential(graph, failing)
        mixer = Mixer(graph, failing)
        ended, failed = await outcome(Executor(streams).run(graph, mixer.kernels))
        assert ended == states, f"seed {seed}"
        assert (failed is None) == (FAILED not in states.values()), f"seed {seed}"
        assert failed is None or states[failed] == FAILED, f"seed {seed}"
        assert mixer.result() == result, f"seed {seed}"


async def test_a_dropped_edge_is_refused_unless_another_path_orders_the_nodes(streams):
    refused = kept = 0
    for seed in range(100):
        graph = random_graph(random.Random(seed))
        for n in graph.nodes:
            for other in n.after:
                less = without_edge(graph, other, n.id)
                mixer = Mixer(graph)
                try:
                    await Executor(streams).run(less, mixer.kernels)
                except UnsoundGraphError:
                    refused += 1
                    continue
                kept += 1
                assert mixer.result() == sequential(graph)[1]
    assert refused > 100
    assert kept > 100


async def test_without_the_verifier_a_dropped_edge_changes_the_result(streams, monkeypatch):
    """The control of both tests above: the sequential run notices what the verifier would have."""
    less = without_edge(DIAMOND, "top", "l")
    assert verify_alone(less)
    monkeypatch.setattr(executor, "verify_alone", lambda graph: ())
    mixer, l_ran = Mixer(DIAMOND), threading.Event()
    slow_top = {
        "top": lambda: (l_ran.wait(SOON), mixer.kernels["top"]()),
        "l": lambda: (mixer.kernels["l"](), l_ran.set()),
    }
    await Executor(streams).run(less, mixer.kernels | slow_top)
    assert mixer.result() != sequential(DIAMOND)[1]

"""Any graph on streams: order, failures, cancellation, and random graphs against a sequential run."""

import asyncio
import random
import threading

import pytest

from kvpp_dag.errors import ConfigError, NodeError, TransferError, UnsoundGraphError
from kvpp_dag.graph import Graph, Kind, Node, build_forward, verify_alone, without_edge
from kvpp_dag.graph.nodes import Policy
from kvpp_dag.runtime import CpuStream, Executor, State, executor
from tests.runtime_support import small_plan

SOON = 20.0
STREAMS = ("a", "b", "c", "d")
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED


@pytest.fixture
def streams():
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
        self.ran = []
        self.failing = failing
        self.gates = gates or {}
        self.kernels = {n.id: lambda n=n.id: self._run(n) for n in graph.nodes}

    def _run(self, name):
        if name in self.gates:
            assert self.gates[name].wait(SOON)
        self.ran.append(name)
        if name in self.failing:
            raise ArithmeticError(f"{name} fell over")


DIAMOND = graph_of(
    node("top", "a"), node("l", "b", "top"), node("r", "c", "top"), node("end", "a", "l", "r")
)


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


async def test_a_failure_cancels_what_depends_on_it_and_nothing_else(streams):
    graph = graph_of(
        node("top", "a"),
        node("bad", "b", "top"),
        node("after_bad", "c", "bad"),
        node("good", "a", "top"),
        node("after_good", "d", "good"),
        node("join", "a", "after_bad", "after_good"),
    )
    ledger = Ledger(graph, failing={"bad"})
    with pytest.raises(
        NodeError, match=r"^Node bad failed: ArithmeticError: bad fell over\.$"
    ) as caught:
        await Executor(streams).run(graph, ledger.kernels)
    assert caught.value.node == "bad"
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert caught.value.states == {
        "top": DONE,
        "bad": FAILED,
        "after_bad": CANCELLED,
        "good": DONE,
        "after_good": DONE,
        "join": CANCELLED,
    }
    assert sorted(ledger.ran) == ["after_good", "bad", "good", "top"]


async def test_what_follows_a_failure_on_its_stream_is_cancelled(streams):
    graph = graph_of(node("bad", "a"), node("next", "a"), node("other", "b"))
    with pytest.raises(NodeError) as caught:
        await Executor(streams).run(graph, Ledger(graph, failing={"bad"}).kernels)
    assert caught.value.states == {"bad": FAILED, "next": CANCELLED, "other": DONE}


async def test_several_failures_surface_once_as_the_first(streams):
    graph = graph_of(node("first", "a"), node("second", "b"), node("third", "c"))
    gates = {"second": threading.Event(), "third": threading.Event()}
    ledger = Ledger(graph, failing={"first", "second", "third"}, gates=gates)

    def fail_and_open():
        try:
            ledger._run("first")
        finally:
            for gate in gates.values():
                threading.Timer(0.1, gate.set).start()

    with pytest.raises(NodeError, match=r"Node first failed.*\(2 more nodes failed\)") as caught:
        await Executor(streams).run(graph, ledger.kernels | {"first": fail_and_open})
    assert set(caught.value.states.values()) == {FAILED}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_what_is_no_exception_fails_its_node_and_not_the_stream(streams, error):
    def raising():
        raise error

    with pytest.raises(NodeError) as caught:
        await Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels | {"top": raising})
    assert caught.value.__cause__ is error
    assert await Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels)


async def test_after_a_failure_the_same_streams_run_the_next_graph(streams):
    with pytest.raises(NodeError):
        await Executor(streams).run(DIAMOND, Ledger(DIAMOND, failing={"top"}).kernels)
    ledger = Ledger(DIAMOND)
    await Executor(streams).run(DIAMOND, ledger.kernels)
    assert len(ledger.ran) == 4


async def cancelled_while_top_runs(streams, *, times=1):
    """Cancel a run of the diamond while `top` runs; what ran, and whether it waited for `top`."""
    gate, running = threading.Event(), threading.Event()
    ledger = Ledger(DIAMOND, gates={"top": gate})
    kernels = ledger.kernels | {"top": lambda: (running.set(), ledger._run("top"))}
    task = asyncio.create_task(Executor(streams).run(DIAMOND, kernels))
    while not running.is_set():
        await asyncio.sleep(0.001)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.02)
    waited = not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    return ledger.ran, waited


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelling_waits_for_the_running_node_and_runs_no_other(streams, times):
    ran, waited = await cancelled_while_top_runs(streams, times=times)
    assert waited
    assert ran == ["top"]
    for stream in streams.values():
        stream.synchronize(SOON)
    assert ran == ["top"]
    assert await Executor(streams).run(DIAMOND, Ledger(DIAMOND).kernels)


async def test_a_timeout_around_a_run_drains_it_too(streams):
    gate = threading.Event()
    ledger = Ledger(DIAMOND, gates={"top": gate})
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Executor(streams).run(DIAMOND, ledger.kernels), 0.05)
    assert ledger.ran == ["top"]


async def test_two_runs_at_once_on_the_same_streams(streams):
    ledgers = [Ledger(DIAMOND) for _ in range(8)]
    await asyncio.gather(*(Executor(streams).run(DIAMOND, ledger.kernels) for ledger in ledgers))
    assert all(ledger.ran[0] == "top" and ledger.ran[3] == "end" for ledger in ledgers)


async def test_kernels_and_streams_must_fit_the_graph(streams):
    kernels = Ledger(DIAMOND).kernels
    run = Executor(streams).run
    with pytest.raises(ConfigError, match="Node 'l' has no kernel"):
        await run(DIAMOND, {name: k for name, k in kernels.items() if name != "l"})
    with pytest.raises(ConfigError, match="kernel 'ghost' belongs to no compute or broadcast node"):
        await run(DIAMOND, kernels | {"ghost": print})
    with pytest.raises(ConfigError, match="'r' runs on stream 'c'; this executor has: a, b"):
        await Executor({name: streams[name] for name in "ab"}).run(DIAMOND, kernels)
    with pytest.raises(ConfigError, match="this executor has: none"):
        await Executor({}).run(DIAMOND, kernels)


async def test_a_stream_that_has_failed_is_an_error_and_not_a_hang(streams):
    def raising():
        raise ZeroDivisionError("long ago")

    streams["b"].launch(raising)
    with pytest.raises(ZeroDivisionError):
        streams["b"].synchronize(SOON)
    ledger = Ledger(DIAMOND)
    with pytest.raises(TransferError, match=r"stream 'b' has failed.*long ago"):
        await Executor(streams).run(DIAMOND, ledger.kernels)
    assert ledger.ran == []


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

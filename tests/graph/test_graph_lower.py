import random
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest

from kvpp_dag.errors import GraphError
from kvpp_dag.graph import Graph, Kind, Node, Policy, Program, Wait, from_text, lower, verify
from kvpp_dag.graph.nodes import EVENTS
from tests.builders import changed, compute, edges, forward, group, swapped

BOTH = pytest.mark.parametrize("policy", Policy)
COMPILED = [
    graph
    for policy, layers, depth, ranks in product(Policy, range(6), (1, 2, 3), (1, 2, 3))
    for graph in group(layers, ranks, policy=policy, depth=depth)
]


class Replay:
    """Runs a program as an engine and its streams do, on vector clocks.

    `before(a, b)` says whether node `a` has ended on every timing before node `b` starts. A node is
    (forward, id).
    """

    def __init__(self, program: Program, forwards: int = 2) -> None:
        self.now = defaultdict(lambda: defaultdict(int))
        self.place = {}
        self.known = {}
        for number in range(forwards):
            self._run(program, number)

    def before(self, a, b) -> bool:
        stream, count = self.place[a]
        return self.known[b].get(stream, 0) >= count

    def _run(self, program, number):
        recorded = {}
        hooks = [program.begin]
        for acquire, release in zip(program.acquire, program.release, strict=True):
            hooks += [acquire, release]
        engine = ["prologue"]
        for i in range(program.layers):
            engine += [f"attend[{i}]", f"compute[{i}]"]
        for hook, node in zip(hooks, engine, strict=True):
            self._steps(hook, number, recorded)
            self._node((number, node), "compute")
        self._steps(program.end, number, recorded)

    def _steps(self, steps, number, recorded):
        for step in steps:
            if isinstance(step, Wait):
                for stream, count in recorded[step.event].items():
                    self.now[step.stream][stream] = max(self.now[step.stream][stream], count)
            else:
                self._node((number, step.id), step.stream)
                if step.kind in EVENTS:
                    recorded[step.id] = dict(self.now[step.stream])

    def _node(self, name, stream):
        assert name not in self.place, f"{name} was issued twice"
        self.known[name] = dict(self.now[stream])
        self.now[stream][stream] += 1
        self.place[name] = (stream, self.now[stream][stream])


def missing_order(graph: Graph, program: Program):
    """What the graph orders and the program does not, over two forwards."""
    replay = Replay(program)
    nodes = [(number, node.id) for number in (0, 1) for node in graph.nodes]
    assert set(replay.place) == set(nodes)
    needed = [((number, a), (number, b)) for number in (0, 1) for a, b in edges(graph)]
    last = {}
    for name in nodes:
        stream = graph[name[1]].stream
        assert replay.place[name][0] == stream
        if stream in last:
            needed.append((last[stream], name))
        last[stream] = name
    return [pair for pair in needed if not replay.before(*pair)]


def without_each_wait(program: Program):
    """Copies of `program`, each without one of its waits."""

    def shorter(steps):
        for i, step in enumerate(steps):
            if isinstance(step, Wait):
                yield steps[:i] + steps[i + 1 :]

    yield from (replace(program, begin=steps) for steps in shorter(program.begin))
    yield from (replace(program, end=steps) for steps in shorter(program.end))
    for name in ("acquire", "release"):
        hooks = getattr(program, name)
        for i, hook in enumerate(hooks):
            for steps in shorter(hook):
                yield replace(program, **{name: (*hooks[:i], steps, *hooks[i + 1 :])})


def test_replaying_a_program_gives_the_order_of_its_graph():
    for graph in COMPILED:
        assert missing_order(graph, lower(graph)) == []


def test_no_wait_of_a_program_is_redundant():
    checked = 0
    for graph in COMPILED:
        for program in without_each_wait(lower(graph)):
            checked += 1
            assert missing_order(graph, program)
    assert checked > 500


def _with_random_edges(rng: random.Random) -> Graph:
    """A compiled graph without some of its edges, and with edges from events to later nodes."""
    graph = forward(rng.randint(1, 5), 2, policy=rng.choice(list(Policy)), depth=rng.randint(1, 3))
    nodes = []
    for i, node in enumerate(graph.nodes):
        after = [name for name in node.after if rng.random() < 0.8]
        events = [n.id for n in graph.nodes[:i] if n.kind in (Kind.READY, Kind.COMPLETION)]
        after += [name for name in events if rng.random() < 0.15]
        nodes.append(replace(node, after=tuple(after)))
    return replace(graph, nodes=tuple(nodes))


def test_graphs_with_other_edges_are_lowered_as_tightly():
    rng = random.Random(7)
    for _ in range(150):
        graph = _with_random_edges(rng)
        program = lower(graph)
        assert missing_order(graph, program) == []
        assert all(missing_order(graph, less) for less in without_each_wait(program))


def _short(steps):
    return [_told(step) for step in steps]


def _told(step):
    if isinstance(step, Wait):
        return f"wait {step.event} on {step.stream}"
    return f"{'record' if step.kind in EVENTS else 'launch'} {step.id} on {step.stream}"


def _transfer(i):
    return [
        f"record ready[{i}] on compute",
        f"wait ready[{i}] on transfer",
        f"launch broadcast[{i}] on transfer",
        f"record completion[{i}] on transfer",
    ]


def _awaited(i):
    return [f"wait completion[{i}] on compute"]


def test_steps_of_each_hook_on_acquire():
    program = lower(forward(3, policy=Policy.ON_ACQUIRE))
    assert _short(program.begin) == _transfer(0)
    assert [_short(steps) for steps in program.acquire] == [
        _transfer(1) + _awaited(0),
        _transfer(2) + _awaited(1),
        _awaited(2),
    ]
    assert program.release == ((), (), ())
    assert program.end == ()


def test_steps_of_each_hook_on_release():
    program = lower(forward(3, policy=Policy.ON_RELEASE))
    assert _short(program.begin) == _transfer(0) + _transfer(1)
    assert [_short(steps) for steps in program.acquire] == [_awaited(0), _awaited(1), _awaited(2)]
    assert [_short(steps) for steps in program.release] == [_transfer(2), [], []]
    assert program.end == ()


@BOTH
def test_a_forward_without_transfers_has_no_steps(policy):
    for graph in (forward(3, history=False, policy=policy), forward(3, 1, policy=policy)):
        program = lower(graph)
        assert program.layers == 3
        assert not any((program.begin, *program.acquire, *program.release, program.end))


def test_an_empty_stage_is_lowered_to_an_empty_program():
    program = lower(forward(0))
    assert (program.layers, program.begin, program.end) == (0, (), ())


def test_what_is_left_after_the_last_layer_goes_to_the_end():
    graph = forward(1)
    flush = Node(id="flush", kind=Kind.READY, stream="compute", after=("completion[0]",))
    join = Node(id="join", kind=Kind.COMPLETION, stream="transfer", after=("flush",))
    program = lower(replace(graph, nodes=(*graph.nodes, flush, join)))
    assert program.end == (
        flush,
        Wait(stream="transfer", event="flush"),
        join,
    )


def test_one_wait_covers_the_events_behind_it():
    graph = changed(forward(3), "attend[2]", after=("completion[0]", "completion[1]", "completion[2]"))
    assert _short(lower(graph).acquire[2]) == _awaited(2)


def test_two_transfer_streams_wait_for_each_other():
    graph = forward(3)
    for i in (1, 2):
        graph = changed(graph, f"broadcast[{i}]", after=(f"ready[{i}]", f"completion[{i - 1}]"))
    for node_id in ("broadcast[1]", "completion[1]"):
        graph = changed(graph, node_id, stream="transfer2")
    program = lower(graph)
    assert verify(graph) == ()
    assert missing_order(graph, program) == []
    assert "wait completion[0] on transfer2" in _short(program.acquire[0])


def _text(*lines):
    header = "# kvpp graph rank=0 ranks=1 layout=- history=true policy=on_acquire depth=1"
    return from_text("\n".join([header, *lines]))


LAYER_0 = ("prologue", "attend[0]", "compute[0]")


@pytest.mark.parametrize(
    ("graph", "complaint"),
    [
        pytest.param(_text(), "computes nothing", id="nothing"),
        pytest.param(_text("attend[0]", "compute[0]"), "drives prologue", id="no-prologue"),
        pytest.param(_text("prologue", "attend[0]"), "drives prologue", id="half-a-layer"),
        pytest.param(_text("prologue", "compute[0]", "attend[0]"), "drives prologue", id="order"),
        pytest.param(_text(*LAYER_0, "attend[2]", "compute[2]"), "drives prologue", id="gap"),
        pytest.param(_text(*LAYER_0, "sample"), "drives prologue", id="unknown-compute"),
        pytest.param(
            changed(forward(2), "attend[1]", layer=0), "drives prologue", id="layer-unlike-label"
        ),
        pytest.param(changed(forward(2), "attend[1]", layer=None), "drives prologue", id="no-layer"),
        pytest.param(changed(forward(2), "prologue", layer=0), "drives prologue", id="prologue-layer"),
        pytest.param(
            _text("prologue", "attend[0] stream=side", "compute[0]"), "on stream 'side'", id="stream"
        ),
        pytest.param(
            changed(forward(2), "attend[0]", after=("broadcast[0]",)),
            "record an event after broadcast[0]",
            id="edge-from-a-broadcast",
        ),
        pytest.param(
            changed(forward(3), "broadcast[2]", after=("attend[0]",)),
            "record an event after attend[0]",
            id="edge-from-compute",
        ),
        pytest.param(
            changed(forward(2), "ready[0]", after=("completion[0]",)), "has a cycle", id="cycle"
        ),
        pytest.param(
            _text("prologue", "attend[0] after completion[0]", "completion[0]", "compute[0]"),
            "issued later",
            id="wait-before-its-record",
        ),
    ],
)
def test_what_hooks_cannot_drive_is_refused(graph, complaint):
    with pytest.raises(GraphError, match=complaint.replace("[", r"\[")):
        lower(graph)


def test_swapped_layers_are_refused_and_the_original_is_not():
    graph = forward(2, history=False)
    lower(graph)
    with pytest.raises(GraphError):
        lower(swapped(graph, 1, 3))


def test_an_edge_from_compute_needs_no_event_if_an_event_after_it_is_awaited_too():
    graph = forward(3)
    extra = changed(graph, "broadcast[2]", after=(*graph["broadcast[2]"].after, "attend[0]"))
    assert extra != graph
    assert list(map(_short, lower(extra).acquire)) == list(map(_short, lower(graph).acquire))


def test_the_replay_sees_a_missing_wait_and_a_late_record():
    graph = Graph(nodes=(compute("prologue"),))
    assert missing_order(graph, lower(graph)) == []
    early = forward(1)
    program = lower(early)
    assert missing_order(early, replace(program, acquire=((),))) == [
        ((n, "completion[0]"), (n, "attend[0]")) for n in (0, 1)
    ]
    with pytest.raises(KeyError):
        Replay(replace(program, begin=tuple(reversed(program.begin))))

"""Recordings for the tests of files: of real forwards of two ranks, and of hypothesis's making."""

import time
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from kvpp_dag.graph import Graph, Kind
from kvpp_dag.graph.order import Cycle, order_of
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import Transport
from kvpp_dag.trace import ForwardRecord, Recorder, Recording, Span
from tests.builders import stage
from tests.graph.graph_strategies import graphs
from tests.runtime_support import make_engine, run_group, small_plan

LAYERS = 5
STEP = 0.002


def sleepy_forwards(transport: Transport) -> Recording:
    """A recording of four forwards, three of them with history, whose compute takes a while."""
    recorder = Recorder()
    plan = small_plan(LAYERS, transport.size)
    engine = make_engine(plan, transport, observer=recorder)
    for history in (False, True, True, True):
        engine.forward.begin(history=history)
        for layer in range(LAYERS):
            time.sleep(STEP * (1 + transport.rank))
            engine.forward.acquire(layer)
            time.sleep(STEP)
            engine.forward.release(layer)
        engine.forward.end()
    return recording_of(recorder.forwards, plan, transport.rank)


def recording_of(forwards, plan: StagePlan, rank: int = 0, **fields) -> Recording:
    """A recording of `forwards`, which were run under `plan`."""
    known = {"rank": rank, "ranks": plan.ranks, "stage": 0, "clock": "a host", "num_blocks": 5}
    return Recording(**known | {"plan": plan, "forwards": tuple(forwards)} | fields)


def real_recordings(ranks: int = 2) -> list[Recording]:
    """What `sleepy_forwards` left on each rank of a group."""
    recordings = run_group("local", ranks, sleepy_forwards)
    assert all(isinstance(recording, Recording) for recording in recordings), recordings
    return recordings


def changed(recording: Recording, number: int, **fields) -> Recording:
    """`recording` with some fields of forward `number` replaced."""
    forwards = tuple(replace(r, **fields) if r.number == number else r for r in recording.forwards)
    return replace(recording, forwards=forwards)


LARGEST = 2**63 - 1


@st.composite
def forwards(draw, graph: Graph, largest: int) -> ForwardRecord:
    """A forward whose times make no sense but are in order."""
    times = st.one_of(st.integers(0, 2000), st.sampled_from([0, 2**40, largest]))
    spans = st.tuples(times, times).map(lambda pair: Span(*sorted(pair)))
    began, ended = draw(spans)
    ids = [node.id for node in graph.nodes]
    completions = [node.id for node in graph.nodes if node.kind is Kind.COMPLETION]
    return ForwardRecord(
        number=draw(st.integers(0, 9)),
        graph=graph,
        began=began,
        ended=draw(st.sampled_from([0, ended])),
        error=draw(st.sampled_from([None, "ValueError: <b>\x1b[31m", ""])),
        needed_blocks=draw(st.sampled_from([None, 0, 3, LARGEST])),
        sent_blocks=draw(st.sampled_from([None, 0, 5])),
        submitted=draw(_rows(ids, times)),
        spans=draw(_rows(ids, spans)),
        waits=draw(_rows(completions, spans)),
    )


def _rows(names, values):
    return st.dictionaries(st.sampled_from(names), values) if names else st.just({})


@st.composite
def odd_recordings(draw, largest: int = LARGEST) -> Recording:
    """Any recording that its file form can hold, sensible or not."""
    base = draw(graphs().filter(_orderly))
    ranks = base.ranks
    made = [base, replace(base, depth=base.depth + 1)]
    names = st.sampled_from(["layers.0", "<script>", "[red]", 'a"b', "\u202e"])
    plan = stage(3, ranks) if all((n.layer or 0) < 3 for n in base.nodes) else None
    return Recording(
        rank=base.rank,
        ranks=ranks,
        stage=draw(st.integers(0, 3)),
        clock=draw(names),
        num_blocks=draw(st.sampled_from([0, 7, LARGEST])),
        plan=plan,
        forwards=tuple(
            draw(st.lists(st.sampled_from(made).flatmap(partial(forwards, largest=largest)), max_size=4))
        ),
    )


def _orderly(graph: Graph) -> bool:
    """Whether the file form takes this graph: no ring, layers and owners in range."""
    small = all((n.layer or 0) < 10_000 and (n.owner or 0) < graph.ranks for n in graph.nodes)
    return small and not isinstance(order_of([graph]), Cycle)

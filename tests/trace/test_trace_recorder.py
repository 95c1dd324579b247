"""What a recorder keeps of real forwards."""

import time
from functools import partial
from itertools import pairwise

import pytest

from kvpp_dag.errors import NodeError, TransferError
from kvpp_dag.graph import Kind, Policy, build_forward
from kvpp_dag.runtime import Arena, CpuStream, Executor, ForwardPass, HostStream
from kvpp_dag.trace import ForwardRecord, Recorder
from tests.runtime_support import LocalGroup, make_engine, run_group, small_plan
from tests.runtime_work import record

SOON = 20.0
MIXED = (0, 1, 0, 1, 2)


def recorded(kind, policy, *, ranks=2, layers=5, blocks=MIXED, keep=64):
    work = partial(record, layers=layers, blocks=blocks, policy=policy, keep=keep)
    results = run_group(kind, ranks, work)
    assert all(isinstance(records, list) for records in results), results
    return results


@pytest.mark.parametrize("kind", ["local", "gloo"])
@pytest.mark.parametrize("policy", list(Policy))
def test_every_node_of_every_forward_is_recorded_once_and_inside_it(kind, policy):
    for rank, records in enumerate(recorded(kind, policy)):
        assert [r.number for r in records] == [1, 2, 3, 4, 5]
        assert [r.graph.history for r in records] == [block > 0 for block in MIXED]
        for forward in records:
            assert forward.graph.rank == rank
            check_complete(forward)


def check_complete(forward: ForwardRecord):
    assert sorted(forward.spans) == sorted(n.id for n in forward.graph.nodes)
    assert set(forward.submitted) == {n.id for n in forward.graph.broadcasts}
    assert list(forward.waits) == [n.id for n in forward.graph.nodes if n.kind is Kind.COMPLETION]
    for span in (*forward.spans.values(), *forward.waits.values()):
        assert forward.began <= span.start <= span.end <= forward.ended, span
    for node in forward.graph.nodes:
        if node.kind in (Kind.READY, Kind.COMPLETION):
            assert forward.spans[node.id].duration == 0
    for name, submitted in forward.submitted.items():
        assert forward.began <= submitted <= forward.spans[name].start
    assert forward.error is None


@pytest.mark.parametrize("policy", list(Policy))
def test_what_was_recorded_is_in_the_order_of_the_graph(policy):
    for records in recorded("local", policy, ranks=3):
        for forward in records:
            spans = forward.spans
            for node in forward.graph.nodes:
                for before in node.after:
                    # A wait ends a little after its event, so an edge may be seen late, never early.
                    assert spans[before].start <= spans[node.id].start, (before, node.id)
                    if node.id.startswith("attend"):
                        assert forward.waits[before].end <= spans[node.id].start


@pytest.mark.parametrize("policy", list(Policy))
def test_the_compute_stream_is_covered_without_gap_or_overlap(policy):
    for forward in recorded("local", policy)[0]:
        compute = [forward.spans[n.id] for n in forward.graph.nodes if n.kind is Kind.COMPUTE]
        pieces = sorted([*compute, *forward.waits.values()])
        for earlier, later in pairwise(pieces):
            assert earlier.end <= later.start


class Dawdling(CpuStream):
    """A stream on which everything launched takes a little longer."""

    def launch(self, work):
        super().launch(lambda: (time.sleep(0.005), work()))


def test_what_a_slow_transfer_stream_reports_goes_to_its_own_forward():
    recorder = Recorder()
    transport = LocalGroup(1).transport(0)
    transport.size = 2  # the other rank's part is not needed: nothing is sent
    kvpp = ForwardPass(
        arena=Arena(small_plan(3, 2), rank=0, num_blocks=2),
        transport=transport,
        compute=HostStream("compute", timeout=SOON),
        transfer=Dawdling("transfer", timeout=SOON),
        observer=recorder,
        skip_broadcasts=True,
    )
    for history in (True, False, True, False):
        kvpp.begin(history=history)
        for layer in range(3):
            kvpp.acquire(layer)
            kvpp.release(layer)
        kvpp.end()
    for forward in recorder.forwards:
        check_complete(forward)


def test_only_the_last_forwards_are_kept():
    for records in recorded("local", Policy.ON_ACQUIRE, keep=2):
        assert [forward.number for forward in records] == [4, 5]


def test_chosen_forwards_are_kept_beside_the_last():
    recorder = Recorder(keep=1, chosen=range(2, 4))
    engine = make_engine(small_plan(3, 1), LocalGroup(1).transport(0), observer=recorder)
    for token in range(5):
        engine.run(token, 0)
    assert [forward.number for forward in recorder.forwards] == [5]
    assert [forward.number for forward in recorder.chosen] == [2, 3]
    for forward in (*recorder.forwards, *recorder.chosen):
        check_complete(forward)
    assert len({forward.began for forward in (*recorder.forwards, *recorder.chosen)}) == 3


def test_what_the_engine_says_of_its_batch_is_kept():
    recorder = Recorder()
    engine = make_engine(small_plan(3, 1), LocalGroup(1).transport(0), observer=recorder)
    for needed in (None, 3):
        engine.forward.begin(history=False, used=list(range(needed)) if needed else None)
        engine.forward.abort()
    assert [forward.needed_blocks for forward in recorder.forwards] == [None, 3]


def test_a_forward_in_flight_can_be_looked_at():
    recorder = Recorder()
    engine = make_engine(small_plan(3, 1), LocalGroup(1).transport(0), observer=recorder)
    engine.forward.begin(history=False)
    engine.forward.acquire(0)
    (forward,) = recorder.forwards
    assert (forward.ended, forward.error) == (0, None)
    assert sorted(forward.spans) == ["attend[0]", "prologue"]
    engine.forward.abort()


def test_an_aborted_forward_says_why_and_the_next_is_complete():
    recorder = Recorder()
    engine = make_engine(small_plan(4, 1), LocalGroup(1).transport(0), observer=recorder)
    with pytest.raises(ArithmeticError) as caught:
        engine.run(0, 0, fail_at=2)
    engine.forward.abort(caught.value)
    engine.run(0, 0)
    aborted, complete = recorder.forwards
    assert aborted.error == "ArithmeticError: compute 2 fell over"
    assert aborted.spans["attend[2]"].end == aborted.ended
    assert not {"compute[2]", "attend[3]"} & set(aborted.spans)
    check_complete(complete)


def test_a_wait_that_failed_lasts_until_the_end():
    recorder = Recorder()
    transport = LocalGroup(2, timeout=0.1).transport(0)  # its peer never comes
    engine = make_engine(small_plan(4, 2), transport, observer=recorder)
    engine.forward.begin(history=True)
    with pytest.raises(TransferError) as caught:
        engine.forward.acquire(0)
    engine.forward.abort(caught.value)
    (forward,) = recorder.forwards
    assert forward.waits["completion[0]"].end == forward.ended
    assert "attend[0]" not in forward.spans


def test_a_recorder_goes_by_the_clock_it_is_given():
    ticks = iter(range(1000, 100_000))
    recorder = Recorder(clock=lambda: next(ticks))
    engine = make_engine(small_plan(3, 1), LocalGroup(1).transport(0), observer=recorder)
    engine.run(0, 0)
    (forward,) = recorder.forwards
    assert forward.began == 1000
    assert forward.ended < 1100
    check_complete(forward)


async def test_the_executor_is_recorded_as_well():
    graph = build_forward(
        small_plan(3, 2), rank=0, num_blocks=2, history=True, policy=Policy.ON_RELEASE, chunks=2
    )
    kernels = {n.id: (lambda: None) for n in graph.nodes if n.kind not in (Kind.READY, Kind.COMPLETION)}
    streams = {name: CpuStream(name, timeout=SOON) for name in ("compute", "transfer", "copy")}
    recorder = Recorder()
    executor = Executor(streams, observer=recorder)
    await executor.run(graph, kernels)
    kernels["attend[1]"] = lambda: 1 / 0
    with pytest.raises(NodeError):
        await executor.run(graph, kernels)
    for stream in streams.values():
        stream.close()
    good, bad = recorder.forwards
    assert (good.number, bad.number) == (1, 2)
    assert sorted(good.spans) == sorted(node.id for node in graph.nodes)
    for node in graph.nodes:
        for before in node.after:
            assert good.spans[before].end <= good.spans[node.id].start
    assert "attend[1]" in bad.error
    assert "attend[2]" not in bad.spans

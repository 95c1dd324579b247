"""What a recorder keeps of real forwards."""

import time
from functools import partial

import pytest

from kvpp_dag.graph import Kind, Policy
from kvpp_dag.runtime import Arena, CpuStream, ForwardPass, HostStream
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
    assert sorted(span.node for span in forward.ran) == sorted(n.id for n in forward.graph.nodes)
    broadcasts = {n.id for n in forward.graph.broadcasts}
    assert set(forward.submitted) == broadcasts
    assert [span.node for span in forward.waited] == [
        n.id for n in forward.graph.nodes if n.kind is Kind.COMPLETION
    ]
    for span in (*forward.ran, *forward.waited):
        assert forward.began <= span.start <= span.end <= forward.ended, span
    starts = {span.node: span.start for span in forward.ran}
    for name in broadcasts:
        assert forward.submitted[name] <= starts[name]
    assert forward.error is None


@pytest.mark.parametrize("policy", list(Policy))
def test_what_was_recorded_is_in_the_order_of_the_graph(policy):
    for records in recorded("local", policy, ranks=3):
        for forward in records:
            spans = {span.node: span for span in forward.ran}
            for node in forward.graph.nodes:
                for before in node.after:
                    # A wait ends a little after its event, so an edge may be seen late, never early.
                    assert spans[before].start <= spans[node.id].start, (before, node.id)


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


def test_an_aborted_forward_says_why_and_the_next_is_complete():
    recorder = Recorder()
    engine = make_engine(small_plan(4, 1), LocalGroup(1).transport(0), observer=recorder)
    with pytest.raises(ArithmeticError) as caught:
        engine.run(0, 0, fail_at=2)
    engine.forward.abort(caught.value)
    engine.run(0, 0)
    aborted, complete = recorder.forwards
    assert aborted.error == "ArithmeticError: compute 2 fell over"
    assert aborted.ended >= aborted.began
    assert "attend[2]" not in {span.node for span in aborted.ran}
    check_complete(complete)

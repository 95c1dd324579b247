"""Scheduling that the worker has to follow: asynchronous steps, preemption, aborts, all with chunks and prefix hits."""

from dataclasses import replace

import pytest

from tests.npu.engine import Engine, run_engines, same
from tests.npu.prompts import coming_and_going

pytestmark = [pytest.mark.npu, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=["synchronous", "asynchronous"])
def runs(request, models, library):
    """Off, on and the control, with so few blocks that requests are preempted."""
    engine = Engine(
        model=models["dense"],
        rounds=coming_and_going(),
        arguments={
            "max_num_batched_tokens": 200,
            "kv_cache_memory_bytes": 64 << 20,
            "num_gpu_blocks_override": 8,
            "async_scheduling": request.param == "asynchronous",
        },
        faults=["delays"],
    )
    settings = [None, {"payload": "active"}, {"skip_broadcasts": True}]
    engines = [replace(engine, kvpp=kvpp) for kvpp in settings]
    return request.param, run_engines(engines, library=library)


def test_tokens_and_logprobs_are_those_without_kvpp_and_not_without_transfers(runs):
    kind, (off, on, control) = runs
    covered = on.covered
    assert on.async_scheduling == (kind == "asynchronous")
    assert min(covered.chunks, covered.preemptions, covered.resumed, covered.aborted) > 0, covered.text()
    assert same(off, on) == len(off.tokens)
    assert same(off, control) < len(off.tokens)

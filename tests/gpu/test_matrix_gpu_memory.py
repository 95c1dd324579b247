"""vLLM's GPU worker finds out itself how much memory is left for the cache: KVPP makes more blocks of it."""

import pytest

from tests.gpu.conftest import LAYERS, on_device
from tests.gpu.test_gpu_tokens import RUNNERS
from tests.support.workload import Outcome, Workload, run_workloads, together

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

TOTAL = 160 << 20
"""Bytes that each rank's device has; vLLM may use nine tenths of them."""

PAGE_BYTES = 16 * 576 * 4


@pytest.fixture(scope="module", params=RUNNERS)
def runs(request, checkpoint, prompts, library) -> dict[str, Outcome]:
    workload = Workload(
        model=checkpoint,
        rounds=[together(prompts, max_tokens=8)],
        engine={"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.9},
        environment={"KVPP_TEST_DEVICE_MEMORY": str(TOTAL)},
        runner=request.param,
        device=library,
    )
    variants = {
        "off": on_device(workload, None),
        "full": on_device(workload, {"payload": "full"}),
        "auto": on_device(workload, {"payload": "auto"}),
        "skipped": on_device(workload, {"skip_broadcasts": True}),
    }
    return dict(zip(variants, run_workloads(list(variants.values())), strict=True))


@pytest.mark.parametrize("name", ["full", "auto"])
def test_tokens_are_those_without_kvpp(runs, name):
    assert runs[name].tokens == runs["off"].tokens


def test_tokens_differ_when_broadcasts_are_skipped(runs):
    pairs = zip(runs["skipped"].tokens, runs["off"].tokens, strict=True)
    assert all(left != right for left, right in pairs)


@pytest.mark.parametrize("name", ["full", "auto"])
def test_the_memory_that_was_left_holds_more_blocks(runs, name):
    off, on = runs["off"], runs[name]
    left = off.num_blocks * LAYERS * PAGE_BYTES
    assert 0.2 * TOTAL < left < 0.9 * TOTAL
    for rank in on.rpc["kvpp_stats"]:
        assert rank["blocks"] == on.num_blocks
        assert 1.3 * off.num_blocks < on.num_blocks
        assert rank["kv_bytes"] < left + LAYERS * PAGE_BYTES

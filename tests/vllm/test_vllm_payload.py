"""Payload active on real vLLM: only the blocks in use are sent, and the tokens are those of KVPP off."""

import pytest

from tests.support.workload import Outcome, Workload, kvpp, random_requests, run_workloads
from tests.vllm.conftest import LAYERS

pytestmark = pytest.mark.timeout(900)

PAGE_BYTES = 16 * 576 * 4
ACTIVE = {"payload": "active"}


@pytest.fixture(scope="module")
def runs(checkpoint) -> dict[str, Outcome]:
    """Chunks, prefix hits, preemption and asynchronous scheduling; `forgetful` leaves a block out of every step."""
    workload = Workload(
        model=checkpoint,
        rounds=[random_requests(12, seed=1, longest=200)],
        engine={
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 64,
            "async_scheduling": True,
            "num_gpu_blocks_override": 24,
            "max_model_len": 256,
        },
        restore=("chunked_prefill", "prefix_caching", "async_scheduling"),
    )
    variants = {
        "off": kvpp(workload, None),
        "on": kvpp(workload, ACTIVE),
        "forgetful": kvpp(workload, ACTIVE, before="tests.support.payloads:forget_a_block"),
        "skipped": kvpp(workload, ACTIVE | {"skip_broadcasts": True}),
    }
    return dict(zip(variants, run_workloads(list(variants.values())), strict=True))


def test_tokens_are_those_without_kvpp(runs):
    assert runs["on"].tokens == runs["off"].tokens
    assert runs["on"].covered == runs["off"].covered


def test_tokens_differ_when_a_block_in_use_is_not_sent(runs):
    assert runs["forgetful"].tokens != runs["off"].tokens


def test_tokens_differ_when_nothing_is_sent(runs):
    long = [n for n, tokens in enumerate(runs["off"].tokens) if len(tokens) > 4]
    assert len(long) > len(runs["off"].tokens) // 2
    assert all(runs["skipped"].tokens[n] != runs["off"].tokens[n] for n in long)


def test_the_blocks_in_use_are_sent_and_no_more(runs):
    covered = runs["on"].covered
    assert 0 < covered.used_blocks < 24 * covered.with_history
    for rank in runs["on"].rpc["kvpp_stats"]:
        assert rank["forwards_with_history"] == covered.with_history
        assert rank["bytes_broadcast"] == covered.used_blocks * LAYERS * PAGE_BYTES
    assert {rank["bytes_broadcast"] for rank in runs["skipped"].rpc["kvpp_stats"]} == {0}


@pytest.mark.parametrize("what", ["chunks", "mixed", "prefix_hits", "preemptions", "resumed"])
def test_the_run_met(runs, what):
    assert getattr(runs["on"].covered, what) > 0, runs["on"].covered.text()


def test_scheduling_was_asynchronous(runs):
    assert runs["on"].covered.in_flight == 2


def test_the_start_line_says_what_is_sent(runs):
    (line, _) = [line for line in runs["on"].log.splitlines() if "blocks with KVPP" in line]
    assert "payload active, policy on_acquire, depth 1; at most " in line

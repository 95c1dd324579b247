"""Chunked prefill, prefix caching, preemption and block overrides, with KVPP on and off."""

import pytest

from tests.support.vllm_cpu import EngineResult, EngineSpec, run_engine
from tests.vllm.test_vllm_tokens import CONTROL, ON, finished

CHUNKED = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 64}
RESTORE = ("chunked_prefill", "prefix_caching")
FEW_BLOCKS = 20  # vLLM wants max_model_len / 16 + 1 at least
OFF: dict[str, object] = {}


def two_rounds(checkpoint, prompts, additional_config) -> EngineResult:
    return finished(
        EngineSpec(
            model=checkpoint,
            rounds=[prompts, prompts],
            max_tokens=6,
            engine=CHUNKED | {"additional_config": additional_config},
            restore=RESTORE,
        )
    )


@pytest.fixture(scope="module")
def chunked_off(checkpoint, prompts):
    return two_rounds(checkpoint, prompts, OFF)


@pytest.fixture(scope="module")
def chunked_on(checkpoint, prompts):
    return two_rounds(checkpoint, prompts, ON)


@pytest.fixture(scope="module")
def chunked_control(checkpoint, prompts):
    return two_rounds(checkpoint, prompts, CONTROL)


def few_blocks(checkpoint, prompts, additional_config) -> EngineResult:
    return finished(
        EngineSpec(
            model=checkpoint,
            rounds=[prompts],
            max_tokens=40,
            engine={
                "num_gpu_blocks_override": FEW_BLOCKS,
                "max_model_len": 256,
                "additional_config": additional_config,
            },
        )
    )


@pytest.fixture(scope="module")
def preempted_off(checkpoint, prompts):
    return few_blocks(checkpoint, prompts, OFF)


@pytest.fixture(scope="module")
def preempted_on(checkpoint, prompts):
    return few_blocks(checkpoint, prompts, ON)


def test_chunks_and_prefix_hits_give_the_same_tokens(chunked_off, chunked_on):
    assert chunked_on.tokens == chunked_off.tokens


def test_the_second_round_hits_the_prefix_cache(chunked_on):
    first, second = chunked_on.cached_tokens
    assert sum(first) == 0
    assert sum(second) > 0


def test_chunks_without_broadcasts_differ(chunked_off, chunked_control):
    assert chunked_control.tokens != chunked_off.tokens


def test_a_smaller_override_is_used_as_it_is(preempted_on, preempted_off):
    assert preempted_on.num_blocks == preempted_off.num_blocks == FEW_BLOCKS


def test_preempted_requests_give_the_same_tokens(preempted_off, preempted_on):
    assert preempted_off.preemptions > 0
    assert preempted_on.preemptions > 0
    assert preempted_on.tokens == preempted_off.tokens


def test_an_override_that_does_not_fit_is_refused_with_both_numbers(checkpoint, prompts):
    result = run_engine(
        EngineSpec(
            model=checkpoint,
            rounds=[prompts],
            engine={"num_gpu_blocks_override": 9999, "additional_config": ON},
        )
    )
    assert result.error is not None
    sentence = "9999 KV cache blocks were asked for, but rank 0 has room for 56"
    assert sentence in result.error + result.log

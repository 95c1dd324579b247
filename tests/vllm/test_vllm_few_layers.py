"""Few layers a stage: two scratch slots cost more than ownership saves; a warning says so, and serving goes on.

Tokens are not compared here: with so few layers no scratch slot is ever used twice, so that leaving the broadcasts
out changes nothing, and the comparison could not fail.
"""

import pytest

from kvpp_vllm.demo.checkpoint import write_checkpoint
from tests.support.vllm_cpu import EngineResult, EngineSpec
from tests.vllm.test_vllm_tokens import ON, finished

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

LAYERS = 3
TOKENS = 8
OFF: dict[str, object] = {}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "small", layers=LAYERS))


def few_layers(model: str, prompts: list[list[int]], additional: dict[str, object]) -> EngineResult:
    return finished(
        EngineSpec(
            model=model,
            rounds=[prompts],
            max_tokens=TOKENS,
            engine={"additional_config": additional},
            rpc=["kvpp_stats"] if additional else [],
        )
    )


@pytest.fixture(scope="module")
def off(small, prompts):
    return few_layers(small, prompts, OFF)


@pytest.fixture(scope="module")
def on(small, prompts):
    return few_layers(small, prompts, ON)


def test_each_rank_warns_with_both_block_counts(off, on):
    assert on.num_blocks < off.num_blocks
    warning = f"KVPP holds {on.num_blocks} blocks where {off.num_blocks} fit without it"
    assert on.log.count(warning) == 2


def test_the_engine_serves_all_the_same(on, prompts):
    assert [len(tokens) for tokens in on.tokens[0]] == [TOKENS] * len(prompts)
    for rank in on.rpc["kvpp_stats"]:
        assert rank["forwards_with_history"] > 0
        assert rank["broadcasts"] == LAYERS * rank["forwards_with_history"]

"""Few layers a stage: two scratch slots cost more than ownership saves; a warning says so, and serving goes on."""

import pytest

from kvpp_vllm.demo.checkpoint import write_checkpoint
from tests.support.vllm_cpu import EngineResult, EngineSpec
from tests.vllm.test_vllm_tokens import CONTROL, ON, finished

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

LAYERS = 3
OFF: dict[str, object] = {}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "small", layers=LAYERS))


def few_layers(model: str, prompts: list[list[int]], additional: dict[str, object]) -> EngineResult:
    return finished(
        EngineSpec(model=model, rounds=[prompts], max_tokens=8, engine={"additional_config": additional})
    )


@pytest.fixture(scope="module")
def off(small, prompts):
    return few_layers(small, prompts, OFF)


@pytest.fixture(scope="module")
def on(small, prompts):
    return few_layers(small, prompts, ON)


@pytest.fixture(scope="module")
def control(small, prompts):
    return few_layers(small, prompts, CONTROL)


def test_each_rank_warns_with_both_block_counts(off, on):
    assert on.num_blocks < off.num_blocks
    warning = f"KVPP holds {on.num_blocks} blocks where {off.num_blocks} fit without it"
    assert on.log.count(warning) == 2


def test_the_engine_serves_the_same_tokens_all_the_same(off, on):
    assert on.tokens == off.tokens


def test_without_broadcasts_the_tokens_differ(off, control):
    assert control.tokens != off.tokens

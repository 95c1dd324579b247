"""Sparse attention on vllm-ascend's own code: bf16 caches, quantised ones, and layers that use another's choice.

The indexer may choose fewer keys than there are, so a cache of it that is wrong shows in the tokens.
"""

import pytest

from tests.npu.engine import Engine, off_on_control, same
from tests.npu.prompts import two_rounds

pytestmark = [pytest.mark.npu, pytest.mark.timeout(1800)]

TOPK = {"KVPP_TEST_NPU_TOPK": "64"}
ARGUMENTS = {"dtype": "bfloat16", "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 24 << 20}
LI, SFA = {"enable_sparse_li_c8": True}, {"enable_sparse_sfa_c8": True}

# model, additional_config, settings, operators of the stand-in that have to have run
CASES = {
    "SFA": ("sparse", {}, {"payload": "full"}, {"npu_lightning_indexer", "npu_sparse_flash_attention"}),
    "SFA, active": ("sparse", {}, {"payload": "active"}, {"npu_lightning_indexer"}),
    "LI-C8": ("sparse", LI, {}, {"npu_lightning_indexer_quant", "npu_sparse_flash_attention"}),
    "SFA-C8": ("sparse", SFA, {}, {"npu_lightning_indexer", "npu_kv_quant_sparse_flash_attention"}),
    "LI-C8, SFA-C8": (
        "sparse",
        LI | SFA,
        {"policy": "on_release", "depth": 2},
        {"npu_lightning_indexer_quant", "npu_kv_quant_sparse_flash_attention"},
    ),
    "shared index": ("shared", {}, {}, {"npu_lightning_indexer", "npu_sparse_flash_attention"}),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request, models, library):
    model, additional, settings, operators = CASES[request.param]
    engine = Engine(
        model=models[model],
        rounds=two_rounds(),
        arguments=ARGUMENTS,
        additional=additional,
        faults=["delays"],
    )
    return operators, off_on_control(engine, settings, library=library, environment=TOPK)


def test_tokens_and_logprobs_are_those_without_kvpp_and_not_without_transfers(case):
    operators, (off, on, control) = case
    assert operators <= {name for name, count in on.operators.items() if count}
    assert same(off, on) == len(off.tokens)
    assert on.blocks > off.blocks
    assert on.covered.prefix_hits > 0
    assert same(off, control) < len(off.tokens)

"""A vllm-ascend with a KVPP of its own: it acts by default, and this project is held to its blocks and tokens."""

from dataclasses import replace

import pytest

from tests.npu.engine import OWN_KVPP, Engine, run_engines, same
from tests.npu.prompts import two_rounds

pytestmark = [pytest.mark.npu, pytest.mark.timeout(1800)]

OWN = {"own": True}
TOPK = {"KVPP_TEST_NPU_TOPK": "64"}
MODELS = {
    "dense": {"max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20},
    "sparse": {"max_num_batched_tokens": 256, "kv_cache_memory_bytes": 24 << 20, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module", params=list(MODELS))
def runs(request, models, library):
    """By name: off, vllm-ascend's own, this project's with two payloads, and this project's with nothing sent."""
    engine = Engine(model=models[request.param], rounds=two_rounds(), arguments=MODELS[request.param])
    settings = {
        "off": None,
        "own": OWN,
        "full": {"payload": "full"},
        "active": {"payload": "active"},
        "nothing sent": {"payload": "full", "skip_broadcasts": True},
    }
    engines = [
        replace(engine, kvpp=kvpp, rpc=["kvpp_stats"] if name in ("full", "active") else [])
        for name, kvpp in settings.items()
    ]
    found = run_engines(engines, library=library, stack=OWN_KVPP, environment=TOPK)
    return dict(zip(settings, found, strict=True))


@pytest.mark.parametrize("name", ["own", "full", "active"])
def test_tokens_and_logprobs_are_those_without_kvpp(runs, name):
    assert same(runs["off"], runs[name]) == len(runs["off"].tokens)
    assert runs[name].blocks > runs["off"].blocks


def test_control_nothing_sent_gives_other_tokens(runs):
    assert same(runs["off"], runs["nothing sent"]) < len(runs["off"].tokens)


def test_it_plans_as_many_blocks_as_vllm_ascends_own(runs):
    assert runs["full"].blocks == runs["own"].blocks


def test_its_own_acts_by_default_and_the_plugin_says_so(runs):
    sentence = "The installed vllm-ascend has a KVPP of its own, which acts on enable_kvpp"
    assert sentence in runs["own"].log
    assert "KVPP rank 0 of 2" not in runs["own"].log
    assert sentence not in runs["full"].log
    assert "KVPP rank 0 of 2" in runs["full"].log


def test_fewer_bytes_are_sent_where_only_blocks_in_use_are(runs):
    sent = {name: runs[name].rpc["kvpp_stats"][0]["bytes_broadcast"] for name in ("full", "active")}
    assert 0 < sent["active"] < sent["full"]

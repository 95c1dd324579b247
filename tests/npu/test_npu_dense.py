"""Dense MLA on vllm-ascend's own worker, runner and attention: what is answered with KVPP on is that with it off."""

from dataclasses import replace

import pytest

from tests.npu.engine import Engine, run_engines, same
from tests.npu.prompts import two_rounds

pytestmark = [pytest.mark.npu, pytest.mark.timeout(1800)]

WAITS = ("no waits of compute", "no waits of transfers")
CHECKED = (*WAITS, "no waits of copies")
HOOKS = ("no acquire of decodes", "no acquire of prefills")
CHUNKED = {"max_num_batched_tokens": 256, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def plain(models) -> Engine:
    """Chunks of prompts, hits of the prefix cache."""
    return Engine(model=models["dense"], rounds=two_rounds(), arguments=CHUNKED)


@pytest.fixture(scope="module")
def payloads(plain, library):
    """By name: off, and on with each payload, policy and depth, all with delays; and the controls."""
    on = {
        "full": {"payload": "full"},
        "active": {"payload": "active"},
        "auto": {},
        "active, on release, depth 2": {"payload": "active", "policy": "on_release", "depth": 2},
        "full, on release": {"payload": "full", "policy": "on_release"},
    }
    engines = {"off": plain}
    engines |= {
        name: replace(plain, kvpp=settings, faults=["delays"], rpc=["kvpp_stats"])
        for name, settings in on.items()
    }
    engines["nothing sent"] = replace(plain, kvpp={"skip_broadcasts": True})
    unchecked = {"payload": "full", "self_check": False}
    engines |= {
        name: replace(plain, kvpp=unchecked, faults=["delays", name]) for name in (*WAITS, *HOOKS)
    }
    engines |= {
        f"checked, {name}": replace(plain, kvpp={"payload": "active"}, faults=["delays", name])
        for name in CHECKED
    }
    return dict(zip(engines, run_engines(list(engines.values()), library=library), strict=True))


@pytest.mark.parametrize(
    "name", ["full", "active", "auto", "active, on release, depth 2", "full, on release"]
)
def test_tokens_and_logprobs_are_those_without_kvpp(payloads, name):
    off, on = payloads["off"], payloads[name]
    assert same(off, on) == len(off.tokens)
    assert on.blocks > off.blocks
    assert (
        min(off.covered.chunks, off.covered.prefix_hits, on.covered.chunks, on.covered.prefix_hits) > 0
    )
    for stats in on.rpc["kvpp_stats"]:
        assert stats["broadcasts"] > 0
        assert (stats["blocks"], stats["blocks_without_kvpp"]) == (on.blocks, off.blocks)


def test_fewer_bytes_are_sent_where_only_blocks_in_use_are(payloads):
    sent = {name: payloads[name].rpc["kvpp_stats"][0]["bytes_broadcast"] for name in ("full", "active")}
    assert 0 < sent["active"] < sent["full"] / 2


@pytest.mark.parametrize(
    "name",
    ["nothing sent", *WAITS],
)
def test_control_a_fault_gives_other_tokens(payloads, name):
    off = payloads["off"]
    assert same(off, payloads[name]) < len(off.tokens)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_is_left_out_is_an_error_of_the_first_step_that_would_need_it(payloads, name):
    assert "called release(0) out of turn: layer 0 is next" in payloads[name].error


@pytest.mark.parametrize("name", CHECKED)
def test_with_its_self_check_the_engine_does_not_start_with_a_wait_left_out(payloads, name):
    checked = payloads[f"checked, {name}"]
    assert checked.error is not None
    assert "SelfCheckError" in checked.log

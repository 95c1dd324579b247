"""Fixed-step MTP: a DeepSeek-V3 with one draft layer, one draft token a step or two."""

from dataclasses import dataclass

import pytest

from tests.support.checkpoints import write_mtp_checkpoint
from tests.support.workload import Outcome, Workload, kvpp, run_workloads, together

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]

LAYERS = 8
PAGE_BYTES = 16 * 576 * 4


@dataclass(frozen=True, kw_only=True)
class Runs:
    """steps: draft tokens a step. forgetful: KVPP on, with draft layers that forget their caches."""

    steps: int
    off: Outcome
    on: Outcome
    control: Outcome
    forgetful: Outcome


@pytest.fixture(scope="module", params=[1, 2], ids="k{}".format)
def runs(request, prompts, tmp_path_factory) -> Runs:
    """With two steps the one draft layer runs twice, the second time on its own output."""
    model = write_mtp_checkpoint(tmp_path_factory.mktemp("models") / "mtp", layers=LAYERS)
    engine = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": request.param},
        "kv_cache_memory_bytes": 32 << 20,
    }
    workload = Workload(model=str(model), rounds=[together(prompts, max_tokens=24)], engine=engine)
    variants = {
        "off": kvpp(workload, None),
        "on": kvpp(workload, {}),
        "control": kvpp(workload, {"skip_broadcasts": True}),
        "forgetful": kvpp(workload, {}, before="tests.support.draft_layers:forget"),
    }
    outcomes = dict(zip(variants, run_workloads(list(variants.values())), strict=True))
    return Runs(steps=request.param, **outcomes)


def test_tokens_are_those_without_kvpp(runs):
    assert runs.on.tokens == runs.off.tokens


def test_every_request_differs_when_broadcasts_are_skipped(runs):
    pairs = zip(runs.control.tokens, runs.off.tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_drafts_are_those_without_kvpp_and_some_are_right(runs):
    assert runs.on.drafts == runs.off.drafts
    assert runs.on.accepted == runs.off.accepted
    assert max(map(len, runs.on.drafts)) == runs.steps
    assert 0 < runs.on.accepted < sum(map(len, runs.on.drafts))


def test_drafts_differ_when_draft_layers_forget(runs):
    assert runs.forgetful.drafts != runs.on.drafts
    assert runs.forgetful.tokens == runs.on.tokens  # a wrong draft costs time, never a token


def test_every_rank_stores_the_draft_layer_for_itself(runs):
    stats = runs.on.rpc["kvpp_stats"]
    assert len(stats) == 2
    for rank in stats:
        assert rank["draft_layers"] == [f"model.layers.{LAYERS}.self_attn.attn"]
        layers = LAYERS // 2 + 2 + 1
        assert rank["kv_bytes"] == rank["blocks"] * layers * PAGE_BYTES


def test_the_draft_layer_is_not_broadcast(runs):
    for rank in runs.on.rpc["kvpp_stats"]:
        assert len(rank["layers_owned"]) == LAYERS // 2
        assert rank["forwards_with_history"] == runs.on.covered.with_history > 0
        assert rank["broadcasts"] == LAYERS * runs.on.covered.with_history

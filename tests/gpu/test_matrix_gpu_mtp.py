"""vLLM's GPU worker with fixed-step MTP, streams delayed at random: tokens and drafts are those of KVPP off."""

from dataclasses import asdict, dataclass, replace

import pytest

from tests.gpu.conftest import on_device
from tests.gpu.test_gpu_tokens import DELAYS, LATE, RUNNERS
from tests.support.checkpoints import write_mtp_checkpoint
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, Workload, run_workloads, together
from tests.vllm.test_matrix_mtp import LAYERS

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

TOKENS = 10
ROUNDS = [
    Faults(delays=DELAYS),
    Faults(delays=DELAYS, way="take_turns", seed=2),
    Faults(delays={"transfer": LATE}, dropped="compute"),
]
"""The rounds of one engine with KVPP on: two must give the tokens of KVPP off; in the last, compute does not wait."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """steps: draft tokens a step. skipped: KVPP on, with nothing sent."""

    steps: int
    off: Outcome
    on: Outcome
    skipped: Outcome

    def of_round(self, number: int) -> list[list[int]]:
        """Tokens of one of `ROUNDS`."""
        count = len(self.off.tokens)
        return self.on.tokens[number * count : (number + 1) * count]


@pytest.fixture(scope="module", params=RUNNERS, ids="v{}".format)
def runner(request) -> int:
    return request.param


@pytest.fixture(scope="module", params=[1, 2], ids="k{}".format)
def runs(request, runner, prompts, library, tmp_path_factory) -> Runs:
    """With two steps the one draft layer runs twice, the second time on its own output."""
    model = write_mtp_checkpoint(tmp_path_factory.mktemp("models") / "mtp", layers=LAYERS)
    requests = together(prompts, max_tokens=TOKENS)
    workload = Workload(
        model=str(model),
        rounds=[requests],
        engine={
            "speculative_config": {"method": "mtp", "num_speculative_tokens": request.param},
            "kv_cache_memory_bytes": 32 << 20,
            "enable_prefix_caching": False,
        },
        runner=runner,
        device=library,
    )
    on = replace(
        on_device(workload, {"payload": "auto"}),
        rounds=[requests] * len(ROUNDS),
        faults=[asdict(faults) for faults in ROUNDS],
    )
    skipped = on_device(workload, {"skip_broadcasts": True})
    outcomes = run_workloads([on_device(workload, None), on, skipped], timeout_s=1600)
    return Runs(steps=request.param, off=outcomes[0], on=outcomes[1], skipped=outcomes[2])


@pytest.mark.parametrize("number", [0, 1])
def test_tokens_are_those_without_kvpp(runs, number):
    assert all(len(tokens) == TOKENS for tokens in runs.off.tokens)
    assert runs.of_round(number) == runs.off.tokens


def test_every_request_differs_when_broadcasts_are_skipped(runs):
    pairs = zip(runs.skipped.tokens, runs.off.tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_every_request_differs_when_compute_does_not_wait(runs):
    pairs = zip(runs.of_round(2), runs.off.tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_some_drafts_are_right_and_it_takes_as_many_steps_as_without_kvpp(runs):
    """Asynchronous scheduling has placeholders for drafts; each draft that is right saves a step."""
    drafts = runs.off.drafts
    assert runs.off.async_scheduling
    assert runs.on.async_scheduling
    assert runs.on.drafts[: 2 * len(drafts)] == drafts * 2
    assert max(map(len, drafts)) == runs.steps
    assert 0 < runs.off.accepted < sum(map(len, drafts))


def test_every_rank_stores_the_draft_layer_for_itself(runs):
    for rank in runs.on.rpc["kvpp_stats"]:
        assert rank["draft_layers"] == [f"model.layers.{LAYERS}.self_attn.attn"]
        assert len(rank["layers_owned"]) == LAYERS // 2
        assert rank["forwards_with_history"] == runs.on.covered.with_history > 0


def test_the_worker_and_the_runner_are_the_gpu_s(runs, runner):
    for run in (runs.off, runs.on, runs.skipped):
        for facts in run.rpc["device_facts"]:
            assert "vllm.v1.worker.gpu_worker.Worker" in facts["worker"]
            assert facts["runner"] == f"{RUNNERS[runner]}.GPUModelRunner"

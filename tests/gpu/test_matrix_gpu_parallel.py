"""vLLM's GPU worker on more ranks and stages: groups of four, uneven pipeline stages, experts spread over a group."""

from dataclasses import asdict, dataclass, replace

import pytest

from tests.gpu.conftest import on_device
from tests.gpu.test_gpu_tokens import DELAYS, LATE, RUNNERS
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, run_workloads, together
from tests.vllm.test_matrix_parallel import tp2_ep, tp2_pp2, tp4

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

TOKENS = 6
ROUNDS = [
    Faults(delays=DELAYS),
    Faults(delays=DELAYS, way="take_turns", seed=2),
    Faults(delays={"transfer": LATE}, dropped="compute"),
]
"""The rounds of one engine with KVPP on: two must give the tokens of KVPP off; in the last, compute does not wait."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """owned[stage]: how many layers each rank of the stage must own. skipped: KVPP on, with nothing sent."""

    off: Outcome
    on: Outcome
    skipped: Outcome
    owned: list[list[int]]

    def of_round(self, number: int) -> list[list[int]]:
        """Tokens of one of `ROUNDS`."""
        count = len(self.off.tokens)
        return self.on.tokens[number * count : (number + 1) * count]


@pytest.fixture(scope="module", params=RUNNERS, ids="v{}".format)
def runner(request) -> int:
    return request.param


@pytest.fixture(scope="module", params=[tp4, tp2_pp2, tp2_ep], ids=lambda make: make.__name__)
def runs(request, runner, prompts, library, tmp_path_factory) -> Runs:
    workload, owned = request.param(tmp_path_factory.mktemp("models"))
    requests = together(prompts, max_tokens=TOKENS)
    workload = replace(
        workload,
        rounds=[requests],
        engine=workload.engine | {"enable_prefix_caching": False},
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
    return Runs(off=outcomes[0], on=outcomes[1], skipped=outcomes[2], owned=owned)


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


def test_each_stage_deals_its_own_layers_to_its_own_group(runs):
    stats = runs.on.rpc["kvpp_stats"]
    found = [
        [len(rank["layers_owned"]) for rank in stats if rank["stage"] == stage]
        for stage in range(len(runs.owned))
    ]
    assert found == runs.owned
    for rank in stats:
        assert rank["forwards_with_history"] == runs.on.covered.with_history > 0


def test_batches_in_flight_are_those_of_the_stages(runs, runner):
    """And one more where scheduling is asynchronous, which vLLM has for stages on Model Runner V2 only."""
    stages = len(runs.owned)
    for run in (runs.off, runs.on, runs.skipped):
        assert run.async_scheduling == (stages == 1 or runner == 2)
        assert run.covered.in_flight == stages + run.async_scheduling


def test_experts_are_spread_over_the_group_where_asked_for(runs, request):
    spread = "tp2_ep" in request.node.name
    for run in (runs.off, runs.on, runs.skipped):
        assert [f"Worker_TP{rank}_EP{rank} " in run.log for rank in (0, 1)] == [spread, spread]


def test_the_worker_and_the_runner_are_the_gpu_s(runs, runner):
    for run in (runs.off, runs.on, runs.skipped):
        for facts in run.rpc["device_facts"]:
            assert "vllm.v1.worker.gpu_worker.Worker" in facts["worker"]
            assert facts["runner"] == f"{RUNNERS[runner]}.GPUModelRunner"

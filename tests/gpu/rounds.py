"""What the matrix tests of vLLM's GPU worker have in common: three engines, of which one changes its faults.

An engine with KVPP off, one with it on, whose rounds have the faults of `ROUNDS`, and one on with nothing sent. Every
such file imports the tests here, and has a fixture `runs`.
"""

from dataclasses import asdict, dataclass, replace

import pytest

from tests.gpu.conftest import on_device
from tests.gpu.test_gpu_tokens import DELAYS, LATE, RUNNERS
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, Workload, run_workloads, together

ROUNDS = [
    Faults(delays=DELAYS),
    Faults(delays=DELAYS, way="take_turns", seed=2),
    Faults(delays={"transfer": LATE}, dropped="compute"),
]
"""Two must give the tokens of KVPP off; in the last, compute does not wait."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """`tokens` is how many each request was to get, `runner` the Model Runner. skipped: on, with nothing sent."""

    off: Outcome
    on: Outcome
    skipped: Outcome
    tokens: int
    runner: int

    def of_round(self, number: int) -> list[list[int]]:
        """Tokens of one of `ROUNDS`."""
        count = len(self.off.tokens)
        return self.on.tokens[number * count : (number + 1) * count]


def run_rounds(workload: Workload, prompts: list[list[int]], *, tokens: int) -> Runs:
    """Run `workload`, which is on the device, with these prompts in every round."""
    requests = together(prompts, max_tokens=tokens)
    workload = replace(workload, rounds=[requests])
    on = replace(
        on_device(workload, {"payload": "auto"}),
        rounds=[requests] * len(ROUNDS),
        faults=[asdict(faults) for faults in ROUNDS],
    )
    engines = [on_device(workload, None), on, on_device(workload, {"skip_broadcasts": True})]
    off, on_, skipped = run_workloads(engines, timeout_s=1600)
    return Runs(off=off, on=on_, skipped=skipped, tokens=tokens, runner=workload.runner)


@pytest.mark.parametrize("number", [0, 1])
def test_tokens_are_those_without_kvpp(runs, number):
    assert all(len(tokens) == runs.tokens for tokens in runs.off.tokens)
    assert runs.of_round(number) == runs.off.tokens


def test_every_request_differs_when_broadcasts_are_skipped(runs):
    pairs = zip(runs.skipped.tokens, runs.off.tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_every_request_differs_when_compute_does_not_wait(runs):
    pairs = zip(runs.of_round(2), runs.off.tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_the_worker_and_the_runner_are_the_gpu_s(runs):
    for run in (runs.off, runs.on, runs.skipped):
        for facts in run.rpc["device_facts"]:
            assert "vllm.v1.worker.gpu_worker.Worker" in facts["worker"]
            assert facts["runner"] == f"{RUNNERS[runs.runner]}.GPUModelRunner"

"""vLLM's GPU worker with KVPP, Model Runners V1 and V2: tokens are those of KVPP off; without a wait they are not."""

from dataclasses import asdict, replace

import pytest

from tests.gpu.conftest import LAYERS, on_device
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, Workload, run_workloads, together

pytestmark = pytest.mark.timeout(900)

TOKENS = 6
REQUESTS = 4
DELAYS = {"compute": 0.002, "transfer": 0.004, "copy": 0.003}
LATE = 0.02
"""Seconds by which work is delayed that another stream does not wait for: longer than a layer takes."""

RUNNERS = {1: "vllm.v1.worker.gpu_model_runner", 2: "vllm.v1.worker.gpu.model_runner"}
RIGHT = {
    "delayed": Faults(delays=DELAYS),
    "delayed, packed": Faults(delays=DELAYS, way="pack"),
    "after the controls": Faults(way="take_turns"),
}
WRONG = {
    "compute": Faults(delays={"transfer": LATE}, dropped="compute"),
    "transfer": Faults(delays={"compute": LATE}, dropped="transfer"),
    "copy": Faults(delays={"transfer": LATE}, dropped="copy", dropped_events="arrived", way="pack"),
}
ROUNDS = [
    *("delayed", "delayed, packed"),
    *WRONG,
    "after the controls",
]
"""The rounds of one engine with KVPP on, by what is changed about it."""


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def runs(runner, checkpoint, prompts, library) -> dict[str, Outcome]:
    """`off`, `on` with a round for each of `ROUNDS`, and `skipped`."""
    requests = together(prompts[2 : 2 + REQUESTS], max_tokens=TOKENS)
    workload = Workload(
        model=checkpoint,
        rounds=[requests],
        # A round must not find what a control has cached.
        engine={"enable_prefix_caching": False},
        runner=runner,
        device=library,
    )
    variants = {
        "off": on_device(workload, None),
        "on": replace(
            on_device(workload, {"payload": "auto"}),
            rounds=[requests] * len(ROUNDS),
            faults=[asdict((RIGHT | WRONG)[name]) for name in ROUNDS],
        ),
        "skipped": on_device(workload, {"payload": "auto", "skip_broadcasts": True}),
    }
    return dict(zip(variants, run_workloads(list(variants.values())), strict=True))


def tokens_of(runs: dict[str, Outcome], name: str) -> list[list[int]]:
    first = ROUNDS.index(name) * REQUESTS
    return runs["on"].tokens[first : first + REQUESTS]


@pytest.mark.parametrize("name", RIGHT)
def test_tokens_are_those_without_kvpp(runs, name):
    assert [len(tokens) for tokens in runs["off"].tokens] == [TOKENS] * REQUESTS
    assert tokens_of(runs, name) == runs["off"].tokens


@pytest.mark.parametrize("name", WRONG)
def test_tokens_differ_where_a_stream_does_not_wait(runs, name):
    pairs = zip(tokens_of(runs, name), runs["off"].tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_tokens_differ_where_nothing_is_sent(runs):
    pairs = zip(runs["skipped"].tokens, runs["off"].tokens, strict=True)
    assert all(left != right for left, right in pairs)
    assert {rank["bytes_broadcast"] for rank in runs["skipped"].rpc["kvpp_stats"]} == {0}


def test_forwards_are_those_that_were_scheduled(runs):
    for rank in runs["on"].rpc["kvpp_stats"]:
        assert rank["forwards_with_history"] == runs["on"].covered.with_history
        assert rank["forwards_with_history"] == (TOKENS - 1) * len(ROUNDS)
        # Two of the rounds packed blocks, in two chunks at least.
        assert rank["broadcasts"] >= LAYERS * (TOKENS - 1) * (len(ROUNDS) + 2)


def test_the_worker_is_the_gpu_s_with_kvpp(runs):
    for name, run in runs.items():
        for facts in run.rpc["device_facts"]:
            kinds = facts["worker"]
            assert "vllm.v1.worker.gpu_worker.Worker" in kinds
            assert ("kvpp_vllm.worker.KvppWorker" in kinds) == (name != "off")
            assert not any("cpu_worker" in kind for kind in kinds)


def test_the_model_runner_is_vllm_s_own(runs, runner):
    found = {facts["runner"] for run in runs.values() for facts in run.rpc["device_facts"]}
    assert found == {f"{RUNNERS[runner]}.GPUModelRunner"}


def test_caches_lie_on_the_device_of_each_rank(runs):
    for run in runs.values():
        devices = [set(facts["cache_devices"]) for facts in run.rpc["device_facts"]]
        assert devices == [{"kvppdev:0"}, {"kvppdev:1"}]


def test_transfers_run_on_a_stream_of_their_own(runs):
    """Without KVPP every collective is on the default stream, and those of the model stay there."""
    of_the_model = runs["off"].rpc["device_facts"][0]["collectives"]
    assert sum(of_the_model[1:]) == 0
    ranks = zip(runs["on"].rpc["device_facts"], runs["on"].rpc["kvpp_stats"], strict=True)
    for facts, stats in ranks:
        default, *others = facts["collectives"]
        (transfers,) = [count for count in others if count > 0]
        assert transfers >= stats["broadcasts"] > 0
        assert of_the_model[0] <= default <= (of_the_model[0] + 1) * len(ROUNDS)

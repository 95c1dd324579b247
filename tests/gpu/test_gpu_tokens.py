"""vLLM's GPU worker with KVPP, Model Runners V1 and V2: tokens are those of KVPP off; without a wait they are not."""

import pytest

from tests.gpu.conftest import on_device
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, Workload, run_workloads, together

pytestmark = pytest.mark.timeout(900)

TOKENS = 6
DELAYS = {"compute": 0.002, "transfer": 0.004, "copy": 0.003}
LATE = 0.02
"""Seconds by which work is delayed that another stream does not wait for: longer than a layer takes."""

PACKED = {"payload": "active", "record": False}
RUNNERS = {1: "vllm.v1.worker.gpu_model_runner", 2: "vllm.v1.worker.gpu.model_runner"}
CONTROLS = ("skipped", "compute", "transfer", "copy")


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def runs(runner, checkpoint, prompts, library) -> dict[str, Outcome]:
    """`off`, `on` with all streams delayed, and the controls by what they leave out."""
    workload = Workload(
        model=checkpoint,
        rounds=[together(prompts[2:6], max_tokens=TOKENS)],
        runner=runner,
        device=library,
    )
    variants = {
        "off": on_device(workload, None),
        "on": on_device(workload, {"payload": "auto"}, Faults(delays=DELAYS)),
        "packed": on_device(workload, PACKED, Faults(delays=DELAYS, way="pack")),
        "skipped": on_device(workload, {"payload": "auto", "skip_broadcasts": True}),
        "compute": on_device(
            workload, {"record": False}, Faults(delays={"transfer": LATE}, dropped="compute")
        ),
        "transfer": on_device(
            workload, {"record": False}, Faults(delays={"compute": LATE}, dropped="transfer")
        ),
        "copy": on_device(
            workload,
            PACKED,
            Faults(delays={"transfer": LATE}, dropped="copy", dropped_events="arrived", way="pack"),
        ),
    }
    return dict(zip(variants, run_workloads(list(variants.values())), strict=True))


@pytest.mark.parametrize("on", ["on", "packed"])
def test_tokens_are_those_without_kvpp(runs, on):
    assert [len(tokens) for tokens in runs["off"].tokens] == [TOKENS] * 4
    assert runs[on].tokens == runs["off"].tokens
    for rank in runs[on].rpc["kvpp_stats"]:
        assert rank["forwards_with_history"] == runs[on].covered.with_history == TOKENS - 1
        assert rank["bytes_broadcast"] > 0


def test_blocks_went_in_several_chunks(runs):
    for rank in runs["packed"].rpc["kvpp_stats"]:
        layers = 12 * rank["forwards_with_history"]
        assert rank["broadcasts"] >= 2 * layers


@pytest.mark.parametrize("control", CONTROLS)
def test_tokens_differ_without(runs, control):
    pairs = zip(runs[control].tokens, runs["off"].tokens, strict=True)
    assert all(left != right for left, right in pairs)


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
    """Beside them the default stream has the model's collectives, about as many as without KVPP."""
    of_the_model = runs["off"].rpc["device_facts"][0]["collectives"]
    assert sum(of_the_model[1:]) == 0
    for on in ("on", "packed"):
        ranks = zip(runs[on].rpc["device_facts"], runs[on].rpc["kvpp_stats"], strict=True)
        for facts, stats in ranks:
            default, *others = facts["collectives"]
            (transfers,) = [count for count in others if count > 0]
            assert transfers >= stats["broadcasts"] > 0
            assert of_the_model[0] <= default < of_the_model[0] + stats["broadcasts"]

"""vLLM's GPU worker with every payload, policy and depth, streams delayed at random: tokens are those of KVPP off."""

from dataclasses import asdict, replace
from itertools import product

import pytest

from tests.gpu.conftest import LAYERS, on_device
from tests.gpu.test_gpu_tokens import DELAYS, LATE, RUNNERS
from tests.support.gpu_platform import Faults
from tests.support.workload import Outcome, Workload, run_workloads, together

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(2000)]

TOKENS = 8
WAYS = {"full": (None,), "active": (None, "send_runs", "pack"), "auto": (None,)}
"""By payload, how forwards send in each round: as the payload has it, or forced."""

CASES = {
    f"{payload}-{policy}-{depth}": {"payload": payload, "policy": policy, "depth": depth}
    for payload, policy, depth in product(WAYS, ("on_acquire", "on_release"), (1, 2, 3))
}


@pytest.fixture(scope="module", params=RUNNERS)
def runs(request, checkpoint, prompts, library) -> dict[str, Outcome]:
    """`off`, a run for each of `CASES`, `skipped`, and `host` and `stream`: see their test."""
    requests = together(prompts, max_tokens=TOKENS)
    workload = Workload(
        model=checkpoint,
        rounds=[requests],
        engine={"enable_prefix_caching": False},
        runner=request.param,
        device=library,
    )
    variants = {"off": on_device(workload, None)}
    for seed, (name, settings) in enumerate(CASES.items()):
        ways = WAYS[settings["payload"]]
        variants[name] = replace(
            on_device(workload, settings),
            rounds=[requests] * len(ways),
            faults=[asdict(Faults(delays=DELAYS, way=way, seed=seed)) for way in ways],
        )
    variants["skipped"] = on_device(workload, {"skip_broadcasts": True})
    dropped = asdict(Faults(delays={"transfer": LATE}, dropped="compute"))
    for completion in ("host", "stream"):
        on = on_device(workload, {"completion": completion})
        variants[completion] = replace(on, faults=[dropped])
    outcomes = run_workloads(list(variants.values()), timeout_s=1900)
    return dict(zip(variants, outcomes, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_without_kvpp(runs, name):
    off, on = runs["off"].tokens, runs[name]
    rounds = len(WAYS[CASES[name]["payload"]])
    assert on.tokens == off * rounds
    for rank in on.rpc["kvpp_stats"]:
        assert rank["forwards_with_history"] == on.covered.with_history == (TOKENS - 1) * rounds


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("active")])
def test_one_of_the_rounds_packed_blocks_in_several_chunks(runs, name):
    """A round of runs has a broadcast a layer or more, one of packed chunks at least two."""
    for rank in runs[name].rpc["kvpp_stats"]:
        assert rank["broadcasts"] >= 4 * LAYERS * (TOKENS - 1)


@pytest.mark.parametrize("control", ["skipped", "stream"])
def test_tokens_differ_in_the_controls(runs, control):
    pairs = zip(runs[control].tokens, runs["off"].tokens, strict=True)
    assert all(left != right for left, right in pairs)


def test_with_completion_on_the_host_the_stream_need_not_wait(runs):
    """The compute stream ignores its waits and transfers are late, in `host` as in its control `stream`."""
    assert runs["host"].tokens == runs["off"].tokens

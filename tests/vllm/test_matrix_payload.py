"""Payloads, policies and depths on real vLLM, with everything that moves requests and blocks about."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvpp_vllm.demo.checkpoint import write_checkpoint
from tests.support.checkpoints import write_mtp_checkpoint
from tests.support.sparse_models import write_sparse_checkpoint
from tests.support.workload import Outcome, Workload, kvpp, random_requests, run_workloads, together

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1700)]

PAGE_BYTES = 16 * 576 * 4
LAYERS = 8
BLOCKS = 24
HOOKS = "tests.support.payloads"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings of KVPP, and the function of tests.support.payloads that is applied to every worker."""

    settings: dict[str, Any]
    hook: str | None = None

    def of(self, workload: Workload) -> Workload:
        return kvpp(workload, self.settings, before=self.hook and f"{HOOKS}:{self.hook}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """layers[stage]: target layers, each of block_bytes a block. right: variants that must give the tokens of
    KVPP off; wrong: those that must not.
    """

    workload: Workload
    right: dict[str, Variant]
    wrong: dict[str, Variant]
    layers: tuple[int, ...] = (LAYERS,)
    block_bytes: int = PAGE_BYTES
    met: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Runs:
    case: Case
    off: Outcome
    right: dict[str, Outcome]
    wrong: dict[str, Outcome]


ACTIVE = {"payload": "active"}
AUTO = {"payload": "auto"}
DEEP = {"policy": "on_release", "depth": 2}
MET = ("chunks", "mixed", "prefix_hits", "preemptions", "resumed", "aborted_in_flight")


def _scheduling(models: Path, layers: int = LAYERS) -> Workload:
    """Chunked prefill, prefix caching, preemption, asynchronous scheduling and aborts together."""
    return Workload(
        model=str(write_checkpoint(models / "mla", layers=layers)),
        rounds=[random_requests(20, seed=1, longest=200)],
        engine={
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "max_num_batched_tokens": 64,
            "async_scheduling": True,
            "num_gpu_blocks_override": BLOCKS,
            "max_model_len": 256,
        },
        restore=("chunked_prefill", "prefix_caching", "async_scheduling"),
    )


def scheduling(models: Path, prompts: list[list[int]]) -> Case:
    return Case(
        workload=_scheduling(models),
        right={
            "packed": Variant(settings=ACTIVE, hook="pack"),
            "runs": Variant(settings=ACTIVE, hook="send_runs"),
            "auto": Variant(settings=AUTO),
            "turns": Variant(settings=AUTO, hook="take_turns"),
            "over gloo": Variant(settings=ACTIVE | {"transport": "process_group"}),
            "active, deep": Variant(settings=ACTIVE | DEEP, hook="pack"),
            "turns, deep": Variant(settings=AUTO | DEEP, hook="take_turns"),
            "full, deep": Variant(settings=DEEP),
        },
        wrong={
            "packed": Variant(settings=ACTIVE | DEEP, hook="forget_a_block"),
            "skipped": Variant(settings=AUTO | DEEP | {"skip_broadcasts": True}),
        },
        met=MET,
    )


def deep(models: Path, prompts: list[list[int]]) -> Case:
    """More layers ahead, up to the most that may be asked for.

    Of so many layers that nine slots have to be reused: else they would keep what a rank wrote there itself, and
    the controls could not differ.
    """

    def ahead(depth: int, policy: str, payload: str) -> dict[str, Any]:
        return {"depth": depth, "policy": policy, "payload": payload}

    workload = _scheduling(models, layers=24)
    return Case(
        workload=replace(workload, engine=workload.engine | {"kv_cache_memory_bytes": 32 << 20}),
        right={
            "3, on acquire": Variant(settings=ahead(3, "on_acquire", "auto"), hook="take_turns"),
            "5, packed": Variant(settings=ahead(5, "on_release", "active"), hook="pack"),
            "8, on acquire": Variant(settings=ahead(8, "on_acquire", "active"), hook="pack"),
            "8, whole": Variant(settings=ahead(8, "on_release", "full")),
        },
        wrong={
            "forgetful": Variant(settings=ahead(8, "on_acquire", "active"), hook="forget_a_block"),
            "skipped": Variant(settings=ahead(8, "on_release", "auto") | {"skip_broadcasts": True}),
        },
        layers=(24,),
        met=MET,
    )


def mtp(models: Path, prompts: list[list[int]]) -> Case:
    """Draft tokens are counted as computed before it is known whether they are right."""
    workload = Workload(
        model=str(write_mtp_checkpoint(models / "mtp", layers=LAYERS)),
        rounds=[together(prompts, max_tokens=24)],
        engine={
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
            "kv_cache_memory_bytes": 32 << 20,
            "async_scheduling": True,
        },
        restore=("async_scheduling",),
    )
    return Case(
        workload=workload,
        right={
            "packed": Variant(settings=ACTIVE, hook="pack"),
            "turns": Variant(settings=AUTO, hook="take_turns"),
            "verified": Variant(settings=ACTIVE | {"verify_transfers": True}),
        },
        wrong={"forgetful": Variant(settings=ACTIVE, hook="forget_a_block")},
    )


def second_runner(models: Path, prompts: list[list[int]]) -> Case:
    """Model Runner V2, which is told of a resumed request as of a new one."""
    return Case(
        workload=replace(_scheduling(models), runner=2),
        right={
            "packed": Variant(settings=ACTIVE, hook="pack"),
            "turns": Variant(settings=AUTO, hook="take_turns"),
        },
        wrong={"forgetful": Variant(settings=ACTIVE, hook="forget_a_block")},
        met=tuple(name for name in MET if name != "resumed"),
    )


def sparse(models: Path, prompts: list[list[int]]) -> Case:
    """DeepSeek-V3.2: bundles of two caches, and a scratch that begins full of NaN (case 17)."""
    model = write_sparse_checkpoint(models / "sparse", family="deepseek", layers=LAYERS)
    return Case(
        workload=replace(_scheduling(models), model=str(model), sparse=True),
        right={
            "packed": Variant(settings=ACTIVE, hook="poison_and_pack"),
            "turns": Variant(settings=AUTO, hook="poison_and_take_turns"),
        },
        wrong={"forgetful": Variant(settings=ACTIVE, hook="forget_a_block")},
        block_bytes=16 * (576 * 4 + 132),
        met=MET,
    )


def stages(models: Path, prompts: list[list[int]]) -> Case:
    """TP2 x PP2: two groups, two batches in flight."""
    workload = Workload(
        model=str(write_checkpoint(models / "pp", layers=13)),
        rounds=[together(prompts, max_tokens=10)],
        workers=4,
        engine={
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "kv_cache_memory_bytes": 48 << 20,
        },
        environment={"VLLM_PP_LAYER_PARTITION": "7,6"},
    )
    return Case(
        workload=workload,
        right={"auto": Variant(settings=AUTO), "active": Variant(settings=ACTIVE)},
        wrong={"skipped": Variant(settings=AUTO | {"skip_broadcasts": True})},
        layers=(7, 6),
    )


@pytest.fixture(
    scope="module",
    params=[scheduling, deep, mtp, second_runner, sparse, stages],
    ids=lambda make: make.__name__,
)
def runs(request, prompts, tmp_path_factory) -> Runs:
    case: Case = request.param(tmp_path_factory.mktemp("models"), prompts)
    variants = [*case.right.values(), *case.wrong.values()]
    workloads = [kvpp(case.workload, None), *(variant.of(case.workload) for variant in variants)]
    off, *on = run_workloads(workloads, timeout_s=1600)
    right = len(case.right)
    return Runs(
        case=case,
        off=off,
        right=dict(zip(case.right, on[:right], strict=True)),
        wrong=dict(zip(case.wrong, on[right:], strict=True)),
    )


def test_tokens_are_those_without_kvpp(runs):
    assert {name for name, run in runs.right.items() if run.tokens != runs.off.tokens} == set()


def test_tokens_differ_when_something_is_not_sent(runs):
    assert {name for name, run in runs.wrong.items() if run.tokens == runs.off.tokens} == set()


def test_drafts_are_those_without_kvpp(runs):
    for run in runs.right.values():
        assert (run.drafts, run.accepted) == (runs.off.drafts, runs.off.accepted)
    assert (runs.off.accepted > 0) == ("speculative_config" in runs.case.workload.engine)


def test_the_run_met_what_it_is_for(runs):
    workload = runs.case.workload
    for run in (runs.off, *runs.right.values()):
        assert ("Using V2 Model Runner" in run.log) == (workload.runner == 2)
        assert run.async_scheduling == workload.engine.get("async_scheduling", False)
        assert [name for name in runs.case.met if getattr(run.covered, name) == 0] == [], (
            run.covered.text()
        )


def test_what_is_sent_is_what_the_tables_of_the_scheduler_say(runs):
    for name, run in runs.right.items():
        used = run.covered.used_blocks
        every = run.covered.with_history * run.num_blocks
        payload = runs.case.right[name].settings.get("payload", "full")
        for rank in run.rpc["kvpp_stats"]:
            assert rank["forwards_with_history"] == run.covered.with_history
            blocks = runs.case.layers[rank["stage"]] * runs.case.block_bytes
            sent, rest = divmod(rank["bytes_broadcast"], blocks)
            assert rest == 0
            assert 0 < used < every
            assert sent == {"full": every, "active": used}.get(payload, sent), name
            assert used <= sent <= every
            if "take_turns" in (runs.case.right[name].hook or ""):
                assert used < sent < every


def test_slots_and_staging_halves_are_part_of_what_is_held(runs):
    for name, run in runs.right.items():
        settings = runs.case.right[name].settings
        halves = 0 if settings.get("payload", "full") == "full" else 2
        for rank in run.rpc["kvpp_stats"]:
            # An eighth of so small a cache, and at most a MiB.
            staging = halves * min(-(-rank["blocks"] // 8), -(-(1 << 20) // runs.case.block_bytes))
            layers = len(rank["layers_owned"]) + settings.get("depth", 1) + 1 + len(rank["draft_layers"])
            assert rank["kv_bytes"] == (rank["blocks"] * layers + staging) * runs.case.block_bytes

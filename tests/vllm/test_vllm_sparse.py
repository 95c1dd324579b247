"""Sparse MLA on real vLLM, its kernels from test support: KVPP on gives the logprobs of KVPP off, bit for bit.

Chunked prefill, prefix hits, prompts longer than `index_topk`, and more layers than scratch slots could hide. The
engine with KVPP is switched between right and wrong transfers as it runs, for which every phase has prompts of its own;
each starts with a KV cache full of NaN (case 17).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Any

import pytest

from tests.support.sparse_models import environment, write_sparse_checkpoint
from tests.support.triton_cpu import model_runner_v2
from tests.support.vllm_cpu import EngineResult, EngineSpec, run_engine
from tests.vllm.test_vllm_tokens import ON

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(2400)]

LAYERS = 10
INDEX_TOPK = 64
LENGTHS = (3, 40, 77, 100, 150)
LONG = slice(2, None)  # requests longer than index_topk
CHUNKED = {"enable_chunked_prefill": True, "enable_prefix_caching": True, "max_num_batched_tokens": 64}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
OFF: dict[str, object] = {}
RIGHT = (
    "phase_right",
    "",
)  # the empty name goes on as before: its prompts are found in the prefix cache


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same rounds with KVPP off and on; `phases` are those of the engine with KVPP."""

    off: EngineResult
    on: EngineResult
    phases: tuple[str, ...]

    def equal(self, phase: str) -> bool:
        """Whether tokens and logprobs of a phase are finite, and equal to the bit."""
        at = self.phases.index(phase)
        finite = all(map(isfinite, chain.from_iterable(self.on.logprobs[at])))
        same = (self.on.tokens[at], self.on.logprobs[at]) == (self.off.tokens[at], self.off.logprobs[at])
        return finite and same

    def long_ones_differ(self, phase: str) -> list[bool]:
        """For every request longer than `index_topk`: whether its logprobs differ."""
        at = self.phases.index(phase)
        pairs = zip(self.on.logprobs[at][LONG], self.off.logprobs[at][LONG], strict=True)
        return [left != right for left, right in pairs]


def rounds(phases: tuple[str, ...]) -> list[list[list[int]]]:
    """A prompt list a phase, new for each that has a name."""
    seed, result = 0, []
    for phase in phases:
        seed += phase != ""
        generator = random.Random(seed)
        result.append([[generator.randrange(2, 300) for _ in range(n)] for n in LENGTHS])
    return result


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Callable[..., EngineResult]:
    directory = tmp_path_factory.mktemp("sparse")
    variables = environment(tmp_path_factory.mktemp("plugins"))

    def run(
        family: str,
        config: dict[str, object],
        phases: tuple[str, ...],
        *,
        index_topk: int = INDEX_TOPK,
        ranks: int = 2,
        arguments: dict[str, Any] = OFF,
        more: dict[str, str] | None = None,
    ) -> EngineResult:
        model = directory / f"{family}-{index_topk}"
        if not model.exists():
            write_sparse_checkpoint(model, family=family, layers=LAYERS, index_topk=index_topk)
        paths = ":".join(v for v in (variables["PYTHONPATH"], (more or {}).get("PYTHONPATH")) if v)
        result = run_engine(
            EngineSpec(
                model=str(model),
                rounds=rounds(phases),
                max_tokens=6,
                ranks=ranks,
                logprobs=True,
                engine=CHUNKED | arguments | {"additional_config": config},
                environment=variables | (more or {}) | {"PYTHONPATH": paths},
                restore=("chunked_prefill", "prefix_caching"),
                before=[[phase] if phase else [] for phase in phases],
                rpc=["kvpp_stats", "kvpp_journal"] if config else [],
            ),
            timeout_s=900,
        )
        assert result.error is None, f"{result.error}\n{result.log[-6000:]}"
        return result

    return run


def pair(engine, family: str, phases: tuple[str, ...], **more: Any) -> Pair:
    """Run both engines; the one without KVPP has no phases but the right one."""
    right = tuple(phase and "phase_right" for phase in phases)
    return Pair(
        off=engine(family, OFF, right, **more), on=engine(family, ON, phases, **more), phases=phases
    )


WRONG = ("phase_nothing_sent", "phase_main_sent", "phase_indexer_sent", "phase_owner_first")


@pytest.fixture(scope="module")
def deepseek(engine) -> Pair:
    """The engine without KVPP has one round more, in which nothing is zeroed."""
    phases = (*RIGHT, *WRONG, "phase_right")
    off = engine("deepseek", OFF, (*RIGHT, *["phase_right"] * len(WRONG), "phase_not_zeroed"))
    return Pair(off=off, on=engine("deepseek", ON, phases), phases=phases)


@pytest.fixture(scope="module")
def glm(engine) -> Pair:
    return pair(engine, "glm", (*RIGHT, "phase_nothing_sent"))


@pytest.fixture(scope="module")
def staged(engine) -> Pair:
    """Two stages of six and four layers, two ranks each, with the 656-byte main cache."""
    return pair(
        engine,
        "deepseek",
        (*RIGHT, "phase_nothing_sent"),
        arguments=STAGES | {"kv_cache_dtype": "fp8_ds_mla"},
        more=ONE_THREAD | {"VLLM_PP_LAYER_PARTITION": "6,4"},
    )


@pytest.fixture(scope="module")
def second_runner(engine, tmp_path_factory) -> Pair:
    """Model Runner V2."""
    more = model_runner_v2(tmp_path_factory.mktemp("triton"))
    return pair(engine, "deepseek", (*RIGHT, "phase_nothing_sent"), more=more)


def test_with_an_index_as_long_as_the_context_it_is_dense_attention(engine):
    """This checks the kernels of test support, and with them every other test here."""
    dense = engine("dense", OFF, RIGHT, ranks=1)
    sparse = engine("deepseek", OFF, RIGHT, ranks=1, index_topk=512)
    short = engine("deepseek", OFF, RIGHT, ranks=1)
    assert sparse.tokens == dense.tokens
    flat = [
        list(chain.from_iterable(chain.from_iterable(result.logprobs))) for result in (sparse, dense)
    ]
    assert max(abs(left - right) for left, right in zip(*flat, strict=True)) < 1e-4
    requests = zip(short.logprobs[0][LONG], dense.logprobs[0][LONG], strict=True)
    assert all(left != right for left, right in requests)


def test_deepseek_v32_gives_the_same_logprobs(deepseek):
    assert deepseek.equal("phase_right")
    assert deepseek.equal("")
    assert sum(deepseek.on.cached_tokens[1]) > 0
    assert deepseek.on.num_blocks > deepseek.off.num_blocks


def test_a_bundle_of_two_caches_is_one_broadcast(deepseek):
    for rank in deepseek.on.rpc["kvpp_stats"]:
        assert len(rank["layers_owned"]) == LAYERS // 2
        assert rank["broadcasts"] == LAYERS * rank["forwards_with_history"] > 0
        bundle = 16 * (576 * 4 + 132)
        assert rank["bytes_broadcast"] == rank["broadcasts"] * rank["blocks"] * bundle


@pytest.mark.parametrize("phase", WRONG[:3])
def test_anything_less_than_the_bundle_differs(deepseek, phase):
    assert all(deepseek.long_ones_differ(phase))


def test_new_blocks_are_zeroed_before_a_forward_begins(deepseek):
    """Case 16: by vLLM's KVBlockZeroer, once a step, on layers that share the address of a scratch slot."""
    steps: list[list[str]] = []
    for event, _ in deepseek.on.rpc["kvpp_journal"][1]:
        steps += [[]] if event == "step" else []
        steps[-1].append(event)
    assert ["step", "zeroed", "began"] in steps
    assert all(step in (["step"], ["step", "began"], ["step", "zeroed", "began"]) for step in steps)


def test_an_owner_that_sends_before_it_zeroes_is_noticed(deepseek):
    assert not deepseek.equal("phase_owner_first")


def test_without_zeroing_the_poison_shows(deepseek):
    """In the last round: KVPP off without zeroing against KVPP on with it."""
    pairs = zip(deepseek.off.logprobs[-1], deepseek.on.logprobs[-1], strict=True)
    assert all(left != right for left, right in pairs)


def test_glm_with_shared_indexes_gives_the_same_logprobs(glm):
    """Case 26: layers 0, 1, 3, 5, 7 and 9 have an indexer, the others a bundle of one cache."""
    assert glm.equal("phase_right")
    assert glm.equal("")
    assert all(glm.long_ones_differ("phase_nothing_sent"))
    main, indexer = 16 * 576 * 4, 16 * 132
    for rank in glm.on.rpc["kvpp_stats"]:
        per_forward = (LAYERS * main + 6 * indexer) * rank["blocks"]
        assert rank["bytes_broadcast"] == per_forward * rank["forwards_with_history"] > 0


def test_packed_caches_over_two_stages_give_the_same_logprobs(staged):
    assert staged.equal("phase_right")
    assert staged.equal("")
    assert all(staged.long_ones_differ("phase_nothing_sent"))
    assert [len(rank["layers_owned"]) for rank in staged.on.rpc["kvpp_stats"]] == [3, 3, 2, 2]
    bundle = 16 * (656 + 132)
    for rank in staged.on.rpc["kvpp_stats"]:
        assert rank["bytes_broadcast"] == rank["broadcasts"] * rank["blocks"] * bundle > 0


def test_model_runner_v2_gives_the_same_logprobs(second_runner):
    assert second_runner.equal("phase_right")
    assert second_runner.equal("")
    assert sum(second_runner.on.cached_tokens[1]) > 0
    assert all(second_runner.long_ones_differ("phase_nothing_sent"))
    steps = [event for event, _ in second_runner.on.rpc["kvpp_journal"][1]]
    assert "zeroed" in steps
    assert steps.count("began") <= steps.count("step")

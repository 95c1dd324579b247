"""Which blocks a step uses, from vLLM's own scheduler outputs (cases 16 to 18 and 20)."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvpp_dag.errors import BlocksError
from kvpp_vllm.blocks import BlockBook
from kvpp_vllm.history import has_history

SIZE = 16
BLOCKS = 400


def step_output(*, new=(), cached=(), resumed=(), scheduled=None, finished=(), preempted=None):
    """A step of vLLM's scheduler.

    `new` are (name, blocks, computed tokens); `cached` the same, with the blocks added in this step, or None;
    `resumed` those of `cached` whose blocks are all that they have. `scheduled` are tokens by name, 1 if not there.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=[],
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_ids=(list(blocks),),
            num_computed_tokens=computed,
            lora_request=None,
        )
        for name, blocks, computed in new
    ]
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=[name for name, _, _ in cached],
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if blocks is None else (list(blocks),) for _, blocks, _ in cached],
        num_computed_tokens=[computed for _, _, computed in cached],
        num_output_tokens=[0 for _ in cached],
    )
    names = [name for name, _, _ in (*new, *cached)]
    step.num_scheduled_tokens = {name: (scheduled or {}).get(name, 1) for name in names}
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    step.finished_req_ids = set(finished)
    step.preempted_req_ids = preempted
    return step


def make_book():
    return BlockBook(num_blocks=BLOCKS, block_size=SIZE)


def listed(book, **output):
    used, fresh = book.step(step_output(**output))
    return used.tolist(), fresh.tolist()


BEGUN = {"new": [("a", [7, 3, 9], 0)], "scheduled": {"a": 40}}
CASES = {
    "a new prompt": ([BEGUN], [], [0, 3, 7, 9]),
    "a prompt that fills its blocks": (
        [{"new": [("a", [5, 6], 0)], "scheduled": {"a": 32}}],
        [],
        [0, 5, 6],
    ),
    "blocks behind what is written": (
        [{"new": [("a", [5, 6, 8], 0)], "scheduled": {"a": 32}}],
        [],
        [0, 5, 6],
    ),
    "a prefix hit": (
        [{"new": [("a", [5, 6, 8], 32)], "scheduled": {"a": 3}}],
        [5, 6],
        [0, 8],
    ),
    "a partly filled block that was copied": (
        [{"new": [("a", [5, 6], 20)], "scheduled": {"a": 3}}],
        [5, 6],
        [0],
    ),
    "the next chunk of a prompt": (
        [
            {"new": [("a", [4], 0)], "scheduled": {"a": 16}},
            {"cached": [("a", [2, 1], 16)], "scheduled": {"a": 20}},
        ],
        [4],
        [0, 1, 2],
    ),
    "a decode into a block that has room": ([BEGUN, {"cached": [("a", None, 40)]}], [3, 7, 9], [0]),
    "a decode into a new block": ([BEGUN, {"cached": [("a", [1], 48)]}], [3, 7, 9], [0, 1]),
    "draft tokens are scheduled tokens": (
        [BEGUN, {"cached": [("a", [1], 47)], "scheduled": {"a": 3}}],
        [3, 7, 9],
        [0, 1],
    ),
    "computed tokens that count drafts as accepted": (
        [BEGUN, {"cached": [("a", [1, 2], 50)], "scheduled": {"a": 3}}],
        [1, 3, 7, 9],
        [0],
    ),
    "a request that is not in the step": (
        [BEGUN, {"new": [("b", [5], 0)], "scheduled": {"b": 9}}],
        [],
        [0, 5],
    ),
    "two requests that share a prefix": (
        [BEGUN, {"new": [("b", [7, 3, 5], 32)], "cached": [("a", None, 40)]}],
        [3, 7, 9],
        [0, 5],
    ),
    "two prompts with one new prefix in one step": (
        [{"new": [("a", [7, 3], 0), ("b", [7, 5], 16)], "scheduled": {"a": 20, "b": 4}}],
        [7],
        [0, 3, 5],
    ),
    "preempted, and resumed from its start": (
        [BEGUN, {"cached": [("a", [5, 6, 4], 0)], "resumed": ["a"], "scheduled": {"a": 41}}],
        [],
        [0, 4, 5, 6],
    ),
    "preempted, and resumed from the prefix cache": (
        [BEGUN, {"cached": [("a", [7, 3, 4], 32)], "resumed": ["a"], "scheduled": {"a": 9}}],
        [3, 7],
        [0, 4],
    ),
    "preempted, and resumed as new by Model Runner V2": (
        [BEGUN, {}, {"new": [("a", [7, 2, 4], 16)], "scheduled": {"a": 25}}],
        [7],
        [0, 2, 4],
    ),
    "preempted by a reset and resumed in one output": (
        [
            BEGUN,
            {"cached": [("a", [8], 0)], "resumed": ["a"], "scheduled": {"a": 9}, "preempted": {"a"}},
        ],
        [],
        [0, 8],
    ),
    "ended, and its name and blocks given away": (
        [BEGUN, {"new": [("a", [9], 0)], "scheduled": {"a": 9}, "finished": ["a"]}],
        [],
        [0, 9],
    ),
    "nothing is scheduled": ([BEGUN, {"finished": ["a"]}], [], [0]),
    "a request that holds the null block": (
        [{"new": [("a", [0, 5], 20)]}],
        [0, 5],
        [],
    ),
}


@pytest.mark.parametrize(("outputs", "used", "fresh"), CASES.values(), ids=CASES)
def test_used_and_fresh_blocks_of_the_last_step(outputs, used, fresh):
    book = make_book()
    results = [listed(book, **output) for output in outputs]
    assert results[-1] == (used, fresh)


@pytest.mark.parametrize(
    "gone", [{"finished": ["a"]}, {"preempted": {"a"}}], ids=lambda gone: next(iter(gone))
)
def test_a_request_that_is_gone_cannot_go_on(gone):
    """An abort reaches the workers as a finished request, in an output that may schedule nothing."""
    book = make_book()
    listed(book, **BEGUN)
    listed(book, **gone)
    with pytest.raises(BlocksError, match="goes on with request 'a'"):
        listed(book, cached=[("a", None, 40)])


def test_lists_are_the_callers_own():
    book = make_book()
    first, _ = book.step(step_output(new=[("a", [5, 6], 20)]))
    second, _ = book.step(step_output(new=[("b", [8], 9)]))
    assert (first.tolist(), second.tolist()) == ([5, 6], [8])
    assert first.dtype == np.int64


@dataclass
class Request:
    """A request of the model scheduler: its own table, written as tokens are computed."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    prompt: int = 0
    told: bool = False
    preempted: bool = False


class ModelScheduler:
    """An independent model: allots blocks to random requests, and keeps who holds which position of which block."""

    def __init__(self, seed: int, *, resumed_as_new: bool) -> None:
        self.rng = random.Random(seed)
        self.resumed_as_new = resumed_as_new
        self.free = list(range(1, BLOCKS))
        self.requests: dict[str, Request] = {}
        self.finished: list[str] = []
        self.made = 0

    def step(self):
        """One output, and the sets of used and fresh blocks, position by position."""
        rng, new, cached, resumed, scheduled = self.rng, [], [], [], {}
        self._end_some()
        while len(self.requests) < 6:
            self._make()
        used, written = set(), set()
        for name, request in self.requests.items():
            if rng.random() < 0.3:
                continue
            left = request.prompt - request.computed
            tokens = rng.randint(1, min(left, 50)) if left > 0 else rng.choice((1, 1, 3))
            before = len(request.blocks)
            while len(request.blocks) * SIZE < request.computed + tokens + 2:
                request.blocks.append(self.free.pop(rng.randrange(len(self.free))))
            used |= {request.blocks[position // SIZE] for position in range(request.computed)}
            end = request.computed + tokens
            written |= {request.blocks[position // SIZE] for position in range(request.computed, end)}
            more = request.blocks[before:]
            if not request.told or (request.preempted and self.resumed_as_new):
                new.append((name, request.blocks, request.computed))
            elif request.preempted:
                cached.append((name, request.blocks, request.computed))
                resumed.append(name)
            else:
                cached.append((name, more or None, request.computed))
            request.told, request.preempted = True, False
            scheduled[name] = tokens
            request.computed = end - (tokens == 3 and rng.random() < 0.5)  # a draft is rejected
        finished, self.finished = self.finished, []
        output = step_output(
            new=new, cached=cached, resumed=resumed, scheduled=scheduled, finished=finished
        )
        return output, sorted(used), sorted({0, *written} - used)

    def _make(self):
        request = Request(prompt=self.rng.randint(1, 150))
        donors = [other for other in self.requests.values() if other.computed >= SIZE]
        if donors and self.rng.random() < 0.5:  # a prefix hit on blocks of another request
            donor = self.rng.choice(donors)
            hits = self.rng.randint(1, donor.computed // SIZE)
            request.blocks, request.computed = donor.blocks[:hits], hits * SIZE
            request.prompt += request.computed
        self.requests[f"r{self.made}"] = request
        self.made += 1

    def _end_some(self):
        for name, request in list(self.requests.items()):
            if self.rng.random() < 0.1:
                del self.requests[name]
                self._give_back(request)
                if request.told:
                    self.finished.append(name)
            elif request.told and self.rng.random() < 0.1:
                self._give_back(request)
                request.blocks, request.computed, request.preempted = [], 0, True

    def _give_back(self, request):
        kept = {
            block for other in self.requests.values() if other is not request for block in other.blocks
        }
        self.free += [block for block in set(request.blocks) - kept if block not in self.free]


@pytest.mark.parametrize("resumed_as_new", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("seed", range(10))
def test_a_random_schedule_is_what_a_model_of_the_tables_says(seed, resumed_as_new):
    scheduler, book = ModelScheduler(seed, resumed_as_new=resumed_as_new), make_book()
    met = set()
    for _ in range(120):
        output, used, fresh = scheduler.step()
        found = book.step(output)
        assert [ids.tolist() for ids in found] == [used, fresh]
        assert has_history(output) == bool(used)
        met |= {"resumed" for _ in output.scheduled_cached_reqs.resumed_req_ids}
        met |= {"hit" for new in output.scheduled_new_reqs if new.num_computed_tokens}
        met |= {"ended" for _ in output.finished_req_ids}
    assert met == {"hit", "ended"} | (set() if resumed_as_new else {"resumed"})
    assert set(book._held) <= {name for name, request in scheduler.requests.items() if request.told}


def test_control_a_book_that_misses_outputs_is_wrong():
    scheduler, book = ModelScheduler(0, resumed_as_new=False), make_book()
    wrong = 0
    for number in range(60):
        output, used, fresh = scheduler.step()
        if number % 10 == 9:
            continue
        try:
            wrong += [ids.tolist() for ids in book.step(output)] != [used, fresh]
        except BlocksError:
            wrong += 1
    assert wrong > 0

"""Whether a step has history, from vLLM's own scheduler output (cases 19 and 20)."""

import pytest

from kvpp_vllm.history import has_history


def scheduler_output(*, new=(), cached=(), **fields):
    """A step of vLLM's scheduler; `new` and `cached` are the computed tokens of its requests."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    names = [f"cached-{i}" for i in range(len(cached))]
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=f"new-{i}",
            prompt_token_ids=list(range(computed + 4)),
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_ids=([i],),
            num_computed_tokens=computed,
            lora_request=None,
        )
        for i, computed in enumerate(new)
    ]
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=names,
        resumed_req_ids=set(fields.pop("resumed", ())),
        new_token_ids=[[] for _ in names],
        all_token_ids={},
        new_block_ids=[None for _ in names],
        num_computed_tokens=list(cached),
        num_output_tokens=[0 for _ in names],
    )
    for name, value in fields.items():
        assert hasattr(step, name)
        setattr(step, name, value)
    return step


STEPS = {
    "nothing scheduled": ({}, False),
    "one new prompt": ({"new": [0]}, False),
    "several new prompts": ({"new": [0, 0, 0]}, False),
    "a prefix hit": ({"new": [16]}, True),
    "a prefix hit behind a new prompt": ({"new": [0, 16]}, True),
    "a new prompt behind a prefix hit": ({"new": [16, 0]}, True),
    "the next chunk of a prompt": ({"cached": [64]}, True),
    "a decode": ({"cached": [7]}, True),
    "a new prompt beside a decode": ({"new": [0], "cached": [7]}, True),
    "preempted, and resumed from its start": ({"cached": [0], "resumed": ["cached-0"]}, False),
    "preempted, and resumed from the prefix cache": ({"cached": [32], "resumed": ["cached-0"]}, True),
    "preempted, and scheduled beside a decode": ({"cached": [0, 7], "resumed": ["cached-0"]}, True),
    # Case 19: the second request shares blocks that this very step fills for the first one.
    "two prompts with one new prefix": ({"new": [0, 16]}, True),
    "two prompts with one new prefix and no cache": ({"new": [0, 0]}, False),
}


@pytest.mark.parametrize(("step", "expected"), STEPS.values(), ids=STEPS)
def test_history_is_what_requests_of_the_step_have_computed(step, expected):
    assert has_history(scheduler_output(**step)) is expected


@pytest.mark.parametrize(
    "fields",
    [
        {"finished_req_ids": {"ended"}},
        {"preempted_req_ids": {"preempted"}},
        {"num_common_prefix_blocks": [4]},
        {"new_block_ids_to_zero": [0, 1]},
        {"total_num_scheduled_tokens": 9},
        {"scheduled_spec_decode_tokens": {"new-0": [3]}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_nothing_else_of_a_step_makes_history(fields):
    """Cases 19 and 20: requests that are not in the step, common blocks and padded tokens decide nothing."""
    assert not has_history(scheduler_output(new=[0], **fields))
    assert has_history(scheduler_output(new=[16], **fields))

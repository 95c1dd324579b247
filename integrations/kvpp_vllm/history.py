"""Whether a forward has history, from the scheduler's output alone.

The output is the same on every rank of an engine, so all ranks decide alike. Attention metadata will not
do: dummy batches and padding look like history there.
"""

from collections.abc import Iterable
from typing import Any


def has_history(scheduler_output: Any) -> bool:
    """Whether any request of this step has computed tokens: prefix hits, chunks, decodes, resumes."""
    return any_computed(
        (
            *(request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs),
            *scheduler_output.scheduled_cached_reqs.num_computed_tokens,
        )
    )


def any_computed(computed: Iterable[int], num_requests: int | None = None) -> bool:
    """Whether any of the first `num_requests` counts (default: all) is above 0; the rest is padding."""
    counts = list(computed)
    return any(count > 0 for count in counts[:num_requests])

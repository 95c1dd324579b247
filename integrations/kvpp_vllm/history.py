"""Whether a forward has history, from the scheduler's output alone.

The output is the same on every rank of an engine, so all ranks decide alike. It lists requests, never the
rows of a padded batch; attention metadata will not do, since dummy batches and padding look like history.
"""

from typing import Any


def has_history(scheduler_output: Any) -> bool:
    """Whether any request of this step has computed tokens: prefix hits, chunks, decodes, resumes."""
    return any(
        request.num_computed_tokens > 0 for request in scheduler_output.scheduled_new_reqs
    ) or any(computed > 0 for computed in scheduler_output.scheduled_cached_reqs.num_computed_tokens)

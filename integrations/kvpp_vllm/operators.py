"""A hook inside the operator in which vLLM's sparse indexer first uses its cache, for compiled models.

A compiled model runs none of the Python around its operators, so that a hook on the indexer's module would be
skipped, or captured. vLLM ends its compiled pieces at the operator, which therefore runs again at every step.
"""

from collections.abc import Mapping
from typing import Any

import torch

from kvpp_dag.errors import NotActiveError
from kvpp_dag.runtime import ForwardPass
from kvpp_vllm.checks import INDEXER_OP


def acquire_in_indexer_op(forward: ForwardPass, ordinals: Mapping[str, int]) -> torch.library.Library:
    """Let the operator acquire the bundle of the indexer cache that it is called for, before it uses it.

    `ordinals` are those of the bundles, by the names of their indexer caches; calls for others, those of draft
    layers among them, pass through. It is so as long as what this returns is kept. Raises NotActiveError if the
    operator does not say which cache it is called for.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - vLLM has made its workers by now

    operator = torch.ops.vllm.sparse_attn_indexer.default
    names = [argument.name for argument in operator._schema.arguments]
    if "k_cache_prefix" not in names:
        raise NotActiveError(
            f"KVPP was asked for and cannot be active: the operator {INDEXER_OP} of the installed vLLM takes "
            f"({', '.join(names)}), and no k_cache_prefix among them; add --enforce-eager."
        )
    place = names.index("k_cache_prefix")
    key = current_platform.dispatch_key
    original = torch.library.get_kernel(operator, key)

    def acquire_first(keys: Any, *args: Any, **kwargs: Any) -> Any:
        name = args[place]
        ordinal = ordinals.get(getattr(name, "value", name))
        # Dummy and profiling runs call layers outside any forward; they have no history to wait for.
        if ordinal is not None and forward.active:
            forward.acquire(ordinal)
        return original.call_boxed(keys, *args, **kwargs)

    library = torch.library.Library("vllm", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("sparse_attn_indexer", acquire_first, key, with_keyset=True)  # type: ignore[no-untyped-call]
    return library

"""The entry point: watch vLLM configurations being made, and act on those that ask for KVPP.

vLLM only logs an exception of a plugin and goes on without it, so `register` does nothing that can fail
for a reason of KVPP's; whatever is wrong is raised where a configuration asks for KVPP.
"""

import functools
import logging
from typing import Any

from kvpp_dag.errors import KvppError, NotActiveError
from kvpp_vllm.ascend.checks import ascend_refusals
from kvpp_vllm.ascend.own import SETTINGS, own_kvpp, read_settings
from kvpp_vllm.ascend.seams import ASCEND_CONFIG_SEAMS, ASCEND_VERSIONS
from kvpp_vllm.checks import WORKERS, end_pieces_at_hooks, refusals
from kvpp_vllm.config import read_config
from kvpp_vllm.config_seams import CONFIG_SEAMS
from kvpp_vllm.seams import check_seams

logger = logging.getLogger("vllm.kvpp")


def register() -> None:
    """Let every VllmConfig made from now on be looked at. Safe to call again."""
    from vllm.config import VllmConfig  # noqa: PLC0415 - vLLM is there only when it loads its plugins

    original = VllmConfig.__post_init__
    if getattr(original, "kvpp", False):
        return

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        activate(self)

    post_init.kvpp = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = post_init


def activate(vllm_config: Any) -> None:
    """Give a configuration that asks for KVPP its worker class; leave every other one alone.

    Raises NotActiveError if KVPP is asked for and cannot be active.
    """
    parallel = vllm_config.parallel_config
    # A configuration that is made from one that was looked at has the worker of this plugin already.
    ascend = str(parallel.worker_cls).startswith(("vllm_ascend.", "kvpp_vllm.ascend."))
    read = read_settings if ascend else read_config
    try:
        config = read(vllm_config.additional_config)
    except KvppError as error:
        raise NotActiveError(f"KVPP was asked for and cannot be active: {error}") from error
    if vllm_config.model_config is None:
        return
    if config is None:
        if ascend and own_kvpp() and vllm_config.additional_config.get("enable_kvpp"):
            logger.warning(
                "The installed vllm-ascend has a KVPP of its own, which acts on enable_kvpp; this plugin "
                "leaves the configuration alone, since two would move the same caches. To let this plugin serve, "
                "leave enable_kvpp out and set %s to its settings as JSON.",
                SETTINGS,
            )
        return
    if ascend:
        check_seams(ASCEND_CONFIG_SEAMS, versions=ASCEND_VERSIONS)
    else:
        check_seams(CONFIG_SEAMS)
    if parallel.tensor_parallel_size == 1:
        logger.warning(
            "KVPP was asked for at tensor parallel size 1, where one rank holds every layer; it changes "
            "nothing. Use --tensor-parallel-size 2 or more."
        )
        return
    reasons = list((ascend_refusals if ascend else refusals)(vllm_config))
    if reasons:
        raise NotActiveError(f"KVPP was asked for and cannot be active: {'; '.join(reasons)}.")
    if not ascend:
        end_pieces_at_hooks(vllm_config)
    parallel.worker_cls = WORKERS.get(parallel.worker_cls, parallel.worker_cls)

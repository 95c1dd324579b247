"""vLLM's own collectives beside KVPP's on CUDA devices: what is refused, what is warned of, and when NCCL is told.

KVPP's broadcasts spin on a few thread blocks until their peers come. NCCL starts the collectives that are its own
in one order on all ranks. vLLM has others, which spin as well and which nobody orders; they can run beside a
broadcast as long as both find room on the device. docs/decisions.md has the reasons.
"""

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvpp_dag.errors import ConfigError, NotActiveError
from kvpp_dag.runtime import find_nccl, judge_nccl, prepare_nccl, uses_nccl
from kvpp_vllm.config_seams import NCCL_SEAMS
from kvpp_vllm.seams import check_seams

logger = logging.getLogger("vllm.kvpp")

ORDERED = "allgather_reducescatter"
"""vLLM's exchange of tokens between experts that consists of NCCL's collectives."""


@dataclass(frozen=True, kw_only=True)
class EngineCollectives:
    """What vLLM would use besides NCCL: `all2all` is None where experts exchange nothing over one."""

    custom: bool = False
    symmetric: bool = False
    flashinfer: bool = False
    flashinfer_pcie: bool = False
    fused: bool = False
    all2all: str | None = None
    library: str | None = None


def engine_collectives(vllm_config: Any) -> EngineCollectives:
    """What a finished configuration, its environment and the installed packages amount to."""
    from vllm import envs  # noqa: PLC0415 - vLLM is there only when a configuration is being made

    parallel = vllm_config.parallel_config
    installed = importlib.util.find_spec("flashinfer") is not None
    return EngineCollectives(
        custom=not parallel.disable_custom_all_reduce,
        symmetric=envs.VLLM_ALLREDUCE_USE_SYMM_MEM,
        flashinfer=envs.VLLM_ALLREDUCE_USE_FLASHINFER and installed,
        flashinfer_pcie=envs.VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC,
        fused=bool(vllm_config.compilation_config.pass_config.fuse_allreduce_rms),
        all2all=parallel.all2all_backend if parallel.use_all2all else None,
        library=envs.VLLM_NCCL_SO_PATH,
    )


def refused_collectives(engine: EngineCollectives) -> Iterator[str]:
    """Why these cannot run beside KVPP's broadcasts; nothing if they can."""
    if engine.flashinfer:
        yield (
            "FlashInfer's all-reduce can fill a whole device with blocks that wait for their peers, and a "
            "broadcast would find no room beside them; set VLLM_ALLREDUCE_USE_FLASHINFER=0"
        )
    if engine.flashinfer_pcie:
        yield (
            "FlashInfer's all-reduce over PCIe waits for its peers outside NCCL's order; set "
            "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=0"
        )
    if engine.fused:
        yield (
            "the fused all-reduce of FlashInfer can fill a whole device with blocks that wait for their peers; "
            "set pass_config.fuse_allreduce_rms to false in --compilation-config"
        )
    if engine.all2all not in (None, ORDERED):
        yield (
            f"all2all backend {engine.all2all} exchanges tokens with kernels that wait for their peers outside "
            f"NCCL's order, those of DeepEP's low-latency mode on a whole device; set --all2all-backend {ORDERED}"
        )
    if engine.library is not None:
        yield (
            f"VLLM_NCCL_SO_PATH is {engine.library!r}, and two copies of NCCL in one process do not know of "
            "each other's collectives; unset it, so that vLLM and torch share torch's"
        )


def unordered_collectives(engine: EngineCollectives) -> Iterator[str]:
    """What is not refused and waits for peers outside NCCL's order: on few blocks, which fit beside a broadcast's."""
    if engine.custom:
        yield "vLLM's custom all-reduce (--disable-custom-all-reduce takes it away)"
    if engine.symmetric:
        yield "torch's all-reduce in symmetric memory (VLLM_ALLREDUCE_USE_SYMM_MEM=0 takes it away)"


def collective_refusals(vllm_config: Any) -> Iterator[str]:
    """What a configuration is refused for, on devices whose collectives are NCCL's."""
    if uses_nccl(vllm_config.device_config.device_type):
        check_seams(NCCL_SEAMS)
        yield from (remark.message for remark in judge_nccl(find_nccl()) if remark.refused)
        yield from refused_collectives(engine_collectives(vllm_config))


def prepare_collectives(vllm_config: Any) -> None:
    """Called in a worker before vLLM makes its first communicator: NCCL reads its environment then.

    Does nothing where caches are on a CPU or an accelerator with other collectives. Raises NotActiveError for
    what KVPP cannot run beside.
    """
    if not uses_nccl(vllm_config.device_config.device_type):
        return
    try:
        warnings = prepare_nccl()
    except ConfigError as error:
        raise NotActiveError(f"KVPP was asked for and cannot be active: {error}") from error
    for warning in warnings:
        logger.warning("KVPP: %s.", warning)
    unordered = list(unordered_collectives(engine_collectives(vllm_config)))
    if unordered:
        logger.warning(
            "KVPP: NCCL does not order %s; it has not been run beside KVPP's broadcasts yet.",
            " and ".join(unordered),
        )

"""NCCL beside another user of NCCL on the same device: what has to hold, and what is set.

KVPP's broadcasts and an engine's collectives are of different communicators on different streams. Unless NCCL
is told to, nothing makes devices start them in one order, and two devices that each run what the other one waits
for wait forever. docs/decisions.md has the reasons. Nothing here concerns caches on a CPU or collectives of
another library.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kvpp_dag.errors import ConfigError

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
"""Set to 1, NCCL orders communicators on a device as their host has issued work to them."""

OLDEST_NCCL = (2, 26)
"""The first version with `LAUNCH_ORDER`."""

OVERLAPPING_CUDA = (12, 3)
"""Runtime and driver from which on ordered communicators may still run at the same time."""

MAX_CTAS = 8
"""Thread blocks of one broadcast at most: whatever it waits beside must find room on the device."""

_WATCHED = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "NCCL_MAX_CTAS", LAUNCH_ORDER)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a process has before its KVPP group is made.

    Versions are major and minor; `cuda` is what torch was built with, `driver` the newest CUDA that the driver
    serves. None is what could not be found. `hip` is the version of ROCm of a torch built for it.
    `communicators` says that torch has a process group of NCCL already.
    """

    nccl: tuple[int, int] | None
    cuda: tuple[int, int] | None
    driver: tuple[int, int] | None
    hip: str | None
    environment: Mapping[str, str]
    communicators: bool


@dataclass(frozen=True, kw_only=True)
class Remark:
    """One sentence about what was found; `refused` if KVPP must not run with it."""

    refused: bool
    message: str


def find_nccl(environment: Mapping[str, str] = os.environ) -> Found:
    """Look at torch, the driver and `environment`; starts nothing on a device."""
    available = dist.is_available() and dist.is_nccl_available()
    version = torch.cuda.nccl.version() if available else None  # type: ignore[no-untyped-call]
    return Found(
        nccl=(version[0], version[1]) if version is not None else None,
        cuda=_version(torch.version.cuda),
        driver=_driver_version(),
        hip=torch.version.hip,
        environment={name: environment[name] for name in _WATCHED if name in environment},
        communicators=available and dist.is_initialized() and "nccl" in dist.get_backend_config(),
    )


def judge_nccl(found: Found) -> tuple[Remark, ...]:
    """What is wrong with it for KVPP, refusals first."""
    if found.hip is not None:
        return (
            _refused(
                f"torch is built for ROCm {found.hip}, and KVPP has no safe way beside the collectives of RCCL: "
                f"without {LAUNCH_ORDER} two communicators can wait for each other forever, and with it ranks "
                "have crashed; turn KVPP off on this machine"
            ),
        )
    return (*_refusals(found), *_warnings(found))


def prepare_nccl(environment: Any = os.environ) -> tuple[str, ...]:
    """Let NCCL order communicators by issue, in this process; before it makes the first one.

    Returns what to warn of. Raises ConfigError with the first refusal.
    """
    remarks = judge_nccl(find_nccl(environment))
    refused = [remark.message for remark in remarks if remark.refused]
    if refused:
        raise ConfigError(f"KVPP cannot send over NCCL here: {refused[0]}.")
    environment[LAUNCH_ORDER] = "1"
    return tuple(remark.message for remark in remarks)


def nccl_options() -> Any:
    """Options for a process group whose broadcasts leave most of the device to others."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MAX_CTAS
    return options


def _refusals(found: Found) -> Iterator[Remark]:
    environment = found.environment
    if found.cuda is None or found.nccl is None:
        yield _refused(
            "this torch has no NCCL, which KVPP needs between CUDA devices; install a build of torch for CUDA"
        )
    elif found.nccl < OLDEST_NCCL:
        yield _refused(
            f"NCCL is {_dotted(found.nccl)}, and only from {_dotted(OLDEST_NCCL)} on it can order two "
            "communicators on one device; install a torch with a newer one"
        )
    order = environment.get(LAUNCH_ORDER)
    if order not in (None, "1"):
        yield _refused(
            f"{LAUNCH_ORDER} is {order!r}, so that KVPP's broadcasts and the engine's collectives could wait for "
            "each other forever; set it to 1 or unset it"
        )
    elif order is None and found.communicators:
        yield _refused(
            f"torch has made a process group of NCCL already, and {LAUNCH_ORDER} was not set before; set it to 1 "
            "where the process starts"
        )
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield _refused(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, which puts all streams of a device into one queue, so that a "
            "broadcast waiting for a peer would hold up the compute behind it; unset it"
        )


def _warnings(found: Found) -> Iterator[Remark]:
    environment = found.environment
    served = [version for version in (found.cuda, found.driver) if version is not None]
    if served and min(served) < OVERLAPPING_CUDA:
        yield _warned(
            f"CUDA is {_dotted(min(served))}, and below {_dotted(OVERLAPPING_CUDA)} NCCL runs ordered communicators "
            "one after another, so KVPP's broadcasts do not overlap with the engine's collectives"
        )
    if found.driver is None:
        yield _warned("the version of CUDA's driver could not be found and was not checked")
    ctas = environment.get("NCCL_MAX_CTAS")
    if ctas is not None and not (ctas.isdecimal() and int(ctas) <= MAX_CTAS):
        yield _warned(
            f"NCCL_MAX_CTAS is {ctas!r} and takes the place of KVPP's {MAX_CTAS} thread blocks a broadcast"
        )
    if environment.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield _warned("CUDA_LAUNCH_BLOCKING is 1, so no transfer overlaps with anything")


def _refused(message: str) -> Remark:
    return Remark(refused=True, message=message)


def _warned(message: str) -> Remark:
    return Remark(refused=False, message=message)


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, minor, *_ = (*text.split("."), "0")
    return int(major), int(minor)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver serves; asking for it initialises nothing."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10

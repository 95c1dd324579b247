"""Memory that other processes of this host can read: anonymous, so that nothing outlives its users.

A segment is a memfd: it has no name in any file system, and the kernel frees it when the last process that
has it open or mapped is gone, however that process ended. So there is nothing to clean up at a start.
"""

import fcntl
import mmap
import os
import sys
import warnings
from bisect import bisect_right, insort
from dataclasses import dataclass

import torch

from kvpp_dag.errors import CapacityError, ConfigError, LayoutError

_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of linux/fcntl.h: mappings made later can only be read."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run of bytes lies: `offset` bytes into segment number `segment` of its owner."""

    segment: int
    offset: int
    nbytes: int


class Segments:
    """The segments of this process, which live as long as this object."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self._files: list[int] = []
        self._starts: list[tuple[int, int]] = []  # addresses and segments, in order of address

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed memory in a segment of its own: uint8 [nbytes]. It has pages already when this returns.

        Raises CapacityError if the host lacks the memory, ConfigError where there are no such segments.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if sys.platform != "linux":
            raise ConfigError(
                f"Shared memory between ranks needs Linux, and this is {sys.platform}; set the transport "
                "to process_group."
            )
        file = os.memfd_create("kvpp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(file, 0o600)
            os.posix_fallocate(file, 0, nbytes)
            memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            os.close(file)
            raise CapacityError(
                f"A shared memory segment of {nbytes} bytes could not be made: {error}. Give the KV "
                "cache less memory, or set the transport to process_group."
            ) from error
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        insort(self._starts, (tensor.data_ptr(), len(self._memory)))
        self._memory.append(tensor)
        self._files.append(file)
        return tensor

    def find(self, flat: torch.Tensor, name: str) -> Place:
        """Where the bytes of `flat` lie. Raises LayoutError, with `name`, if that is in no segment."""
        address, nbytes = flat.data_ptr(), flat.numel()
        before = bisect_right(self._starts, (address, len(self._memory))) - 1
        if before >= 0 and flat.device.type == "cpu":
            start, segment = self._starts[before]
            if address + nbytes <= start + self._memory[segment].numel():
                return Place(segment=segment, offset=address - start, nbytes=nbytes)
        raise LayoutError(
            f"{name} ({nbytes} bytes on {flat.device}) is not in shared memory, where the other ranks could "
            "read it; take its memory from the transport's allocate, as in Arena(allocate=transport.allocate)."
        )

    def file(self, segment: int) -> int:
        """The file descriptor of a segment, to be passed to a process that shall map it."""
        return self._files[segment]

    def close(self) -> None:
        """Pass no segment on any more. Memory that tensors still refer to stays until they are gone."""
        for file in self._files:
            os.close(file)
        self._files.clear()


def map_segment(file: int) -> torch.Tensor:
    """Map a segment of another process to be read, never written: uint8 [its size]. Closes `file`."""
    try:
        memory = mmap.mmap(
            file,
            os.fstat(file).st_size,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ,
        )
    finally:
        os.close(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)

"""Transport between ranks that are threads of one process: for tests and single-device checks."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvpp_dag.errors import ConfigError, DivergenceError, TransferError
from kvpp_dag.runtime.transport import as_bytes


@dataclass(kw_only=True)
class _Meeting:
    """One collective: what the first rank to arrive brought, and who has arrived and left."""

    what: tuple[str, object]
    source: torch.Tensor | None = None
    arrived: set[int] = field(default_factory=set)
    left: int = 0
    failed: str | None = None


class LocalGroup:
    """A group of `size` ranks in one process; `transport(rank)` gives each its end.

    A collective that not all ranks join within `timeout` seconds raises TransferError; ranks that meet
    with different collectives raise DivergenceError.
    """

    def __init__(self, size: int, *, timeout: float = 30.0) -> None:
        if size < 1:
            raise ConfigError(f"A local group of {size} ranks was asked for; it needs at least one.")
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}

    def transport(self, rank: int) -> "LocalTransport":
        """The transport of one rank."""
        return LocalTransport(self, rank)

    def meet(
        self,
        *,
        rank: int,
        sequence: int,
        what: tuple[str, object],
        source: torch.Tensor | None,
        take: Callable[[torch.Tensor], object] | None,
    ) -> None:
        """Join collective number `sequence` as `rank`; returns when every rank has what it needs."""
        with self._changed:
            meeting = self._meetings.setdefault(sequence, _Meeting(what=what))
            if meeting.what != what:
                meeting.failed = f"rank {rank} came with {what}, another with {meeting.what}"
            meeting.arrived.add(rank)
            if source is not None:
                meeting.source = source
            self._changed.notify_all()
            self._await(lambda: len(meeting.arrived) == self.size, meeting, rank, sequence)
        if take is not None and meeting.source is not None:
            take(meeting.source)
        with self._changed:
            meeting.left += 1
            self._changed.notify_all()
            self._await(lambda: meeting.left == self.size, meeting, rank, sequence)
            self._meetings.pop(sequence, None)

    def _await(self, done: Callable[[], bool], meeting: _Meeting, rank: int, sequence: int) -> None:
        deadline = time.monotonic() + self.timeout
        while not done() and meeting.failed is None:
            if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() > deadline:
                meeting.failed = f"only ranks {sorted(meeting.arrived)} joined"
                self._changed.notify_all()
                raise TransferError(
                    f"Collective {sequence} of a local group of {self.size} waited {self.timeout:g} s "
                    f"on rank {rank}; only ranks {sorted(meeting.arrived)} joined."
                )
        if meeting.failed is not None:
            raise DivergenceError(f"Collective {sequence} diverged: {meeting.failed}.")


class LocalTransport:
    """One rank's end of a LocalGroup."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        if not 0 <= rank < group.size:
            raise ConfigError(f"Rank {rank} is not one of the {group.size} ranks of its local group.")
        self.group = group
        self.rank = rank
        self.size = group.size
        self._sequence = 0

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """The broadcast of `view` from `owner`: every other rank copies from the owner's memory."""
        flat = as_bytes(view, f"the cache sent by rank {owner}")
        owned = owner == self.rank
        what = ("broadcast", (owner, flat.numel()))

        def broadcast() -> None:
            self._meet(what, flat if owned else None, None if owned else flat.copy_)

        return broadcast

    def agree(self, token: bytes) -> None:
        """Meet with `token`; ranks with different tokens diverge."""
        self._meet(("agree", token), None, None)

    def _meet(
        self,
        what: tuple[str, object],
        source: torch.Tensor | None,
        take: Callable[[torch.Tensor], object] | None,
    ) -> None:
        self._sequence += 1
        self.group.meet(rank=self.rank, sequence=self._sequence, what=what, source=source, take=take)

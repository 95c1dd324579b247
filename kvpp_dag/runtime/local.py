"""Transport between ranks that are threads of one process: for tests and single-device checks.

On host memory a collective is done when it returns. On an accelerator the ranks' hosts meet to submit it,
and events order the copies: each receiver's stream waits for the owner's, copies, and the owner's stream
waits for all receivers, as in a collective of two devices.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from kvpp_dag.errors import ConfigError, DivergenceError, TransferError
from kvpp_dag.runtime.native import NativeEvent
from kvpp_dag.runtime.transport import as_bytes


@dataclass(frozen=True, kw_only=True)
class Source:
    """What the owner brings: its bytes and, on an accelerator, events that it records and waits for."""

    flat: torch.Tensor
    sent: torch.Event | None = None
    taken: tuple[torch.Event, ...] = ()


@dataclass(kw_only=True)
class _Meeting:
    """One collective: what the first rank to arrive brought, who has arrived and left, and why it failed."""

    what: tuple[str, object]
    source: Source | None = None
    arrived: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    failure: tuple[type[TransferError], str] | None = None

    def fail(self, kind: type[TransferError], reason: str) -> None:
        """Make every rank raise `kind`; the first reason counts, since later ones follow from it."""
        self.failure = self.failure or (kind, reason)


class LocalGroup:
    """A group of `size` ranks in one process; `transport(rank)` gives each its end.

    A collective that not all ranks join and finish within `timeout` seconds raises TransferError on
    every rank, late ones too; ranks that meet with different collectives raise DivergenceError.
    """

    def __init__(self, size: int, *, timeout: float = 30.0) -> None:
        if size < 1:
            raise ConfigError(f"A local group of {size} ranks was asked for; it needs at least one.")
        self.size = size
        self.timeout = timeout
        self._changed = threading.Condition()
        self._meetings: dict[tuple[str, int], _Meeting] = {}

    def transport(self, rank: int) -> "LocalTransport":
        """The transport of one rank."""
        return LocalTransport(self, rank)

    def meet(
        self,
        *,
        rank: int,
        sequence: int,
        what: tuple[str, object],
        source: Source | None = None,
        take: Callable[[Source], object] | None = None,
    ) -> None:
        """Join number `sequence` of the collectives of one kind, `what[0]`, as `rank`.

        Returns when every rank has what it needs. Kinds are counted apart, since a rank may run them on
        different threads.
        """
        key = (what[0], sequence)
        with self._changed:
            meeting = self._meetings.setdefault(key, _Meeting(what=what))
            if meeting.what != what:
                meeting.fail(
                    DivergenceError, f"rank {rank} came with {what}, another with {meeting.what}"
                )
            meeting.arrived.add(rank)
            if source is not None:
                meeting.source = source
            self._changed.notify_all()
        try:
            self._await(meeting, meeting.arrived, "joined", rank, sequence)
            if take is not None and meeting.source is not None:
                take(meeting.source)
        except Exception as error:
            with self._changed:
                meeting.fail(TransferError, f"rank {rank} failed: {error}")
            raise
        finally:
            self._leave(key, meeting, rank)
        self._await(meeting, meeting.left, "finished", rank, sequence)

    def _leave(self, key: tuple[str, int], meeting: _Meeting, rank: int) -> None:
        """Let go of a meeting, failed or not; it is forgotten when nobody can come to it any more."""
        with self._changed:
            meeting.left.add(rank)
            if len(meeting.left) == self.size:
                self._meetings.pop(key, None)
            self._changed.notify_all()

    def _await(self, meeting: _Meeting, ranks: set[int], did: str, rank: int, sequence: int) -> None:
        """Wait until all are in `ranks`, the set of those that `did` something; raise the failure."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(ranks) == self.size or meeting.failure is not None, self.timeout
            )
            if len(ranks) < self.size:
                reason = f"rank {rank} waited {self.timeout:g} s and only ranks {sorted(ranks)} {did}"
                meeting.fail(TransferError, reason)
                self._changed.notify_all()
            if meeting.failure is not None:
                kind, reason = meeting.failure
                verb = "diverged" if kind is DivergenceError else "failed"
                raise kind(f"Collective {sequence} of a local group of {self.size} {verb}: {reason}.")


class LocalTransport:
    """One rank's end of a LocalGroup."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        if not 0 <= rank < group.size:
            raise ConfigError(f"Rank {rank} is not one of the {group.size} ranks of its local group.")
        self.group = group
        self.rank = rank
        self.size = group.size
        self._sequence = {"agree": 0, "broadcast": 0}

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """The broadcast of `view` from `owner`: every other rank copies from the owner's memory."""
        flat = as_bytes(view, f"the cache sent by rank {owner}")
        what = ("broadcast", (owner, flat.numel()))
        if owner != self.rank:
            return partial(self._meet, what, take=partial(_take, self.rank, flat))
        if flat.device.type == "cpu":
            return partial(self._meet, what, source=Source(flat=flat))
        taken = tuple(NativeEvent(flat.device) for _ in range(self.size))
        return partial(self._send, what, Source(flat=flat, sent=NativeEvent(flat.device), taken=taken))

    def agree(self, token: bytes) -> None:
        """Meet with `token`; ranks with different tokens diverge."""
        self._meet(("agree", token))

    def _send(self, what: tuple[str, object], source: Source) -> None:
        """Send from an accelerator: the current stream goes on when every receiver's copy has run."""
        if source.sent is not None:
            source.sent.record()
        self._meet(what, source=source)
        for rank, event in enumerate(source.taken):
            if rank != self.rank:
                event.wait()

    def _meet(
        self,
        what: tuple[str, object],
        *,
        source: Source | None = None,
        take: Callable[[Source], object] | None = None,
    ) -> None:
        self._sequence[what[0]] += 1
        sequence = self._sequence[what[0]]
        self.group.meet(rank=self.rank, sequence=sequence, what=what, source=source, take=take)


def _take(rank: int, flat: torch.Tensor, source: Source) -> None:
    """Receive into `flat`; on an accelerator, submit that to the current stream."""
    if source.sent is not None:
        source.sent.wait()
    flat.copy_(source.flat, non_blocking=True)
    if source.sent is not None:
        source.taken[rank].record()

"""Why compute stood waiting for a layer: every nanosecond of an exposed wait is given to one cause.

`docs/overlap.md` has the definitions and the order in which they are tried.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import median

from kvpp_dag.trace.records import ForwardRecord, Span
from kvpp_dag.trace.transfers import Transfer


class Cause(StrEnum):
    """What a part of an exposed wait is owed to; the value is a short phrase for people."""

    LINK = "link slower than compute"
    SLOT = "scratch slot not free"
    HOOK = "hook reached late"
    DISPATCH = "host woke late"
    PREVIOUS = "previous transfer still running"
    FIRST = "first layer"
    PEER = "peer late"
    UNFINISHED = "transfer did not finish"


ADVICE: Mapping[Cause, str] = {
    Cause.LINK: "send fewer bytes (payload active), compute more per step (longer chunks, more requests), "
    "or turn KVPP off for this load",
    Cause.SLOT: "a greater prefetch depth: one more scratch slot lets the transfer start earlier",
    Cause.HOOK: "policy on_release: the next transfer starts when the slot is free, not at the next layer",
    Cause.DISPATCH: "the host is busy: give its threads free cores, and keep long pure Python out of the "
    "forward",
    Cause.PREVIOUS: "see what held the transfer that is named; bundles of more even size or a greater "
    "prefetch depth take up the swing",
    Cause.FIRST: "expected: only the prologue can hide the first transfer",
    Cause.PEER: "look at the rank that is named: why it came late",
    Cause.UNFINISHED: "see the forward's error and the recordings of the other ranks",
}
"""What to try against each cause."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """`ns` nanoseconds of an exposed wait and what they are owed to.

    `detail` is a whole phrase such as `attend[10] held slot 0 until 1.300 ms into the forward`; `node` is
    the node it names, if it names one.
    """

    cause: Cause
    ns: int
    detail: str
    node: str | None


def causes(
    record: ForwardRecord,
    peers: Mapping[int, ForwardRecord],
    done: Mapping[int, Transfer],
    waits: Mapping[int, Span],
) -> dict[int, tuple[Part, ...]]:
    """What the wait of each layer is owed to, the largest part first; the parts add up to the wait.

    `done` are the transfers of `record` in issue order, `waits` the exposed wait of each layer that waited;
    `peers` as for `transfers`.
    """
    begins = {record.graph.rank: record.began} | {rank: peer.began for rank, peer in peers.items()}
    last = max(begins, key=begins.__getitem__)
    usual = _Usual(done.values())
    lag = _Lag()
    result: dict[int, tuple[Part, ...]] = {}
    for layer, transfer in done.items():
        wait = _Wait(record.began, transfer, waits.get(layer, Span(transfer.end, transfer.end)))
        found = wait.first(begins[last], last) if transfer.first else wait.late(lag, usual)
        parts = [
            Part(cause=cause, ns=ns, detail=phrase(), node=node)
            for cause, ns, phrase, node in (*wait.ends(), *found)
            if ns > 0
        ]
        result[layer] = tuple(sorted(parts, key=lambda part: -part.ns))
        lag = lag.after(wait, usual)
    for layer, span in waits.items():
        if layer not in done:
            detail = f"the transfer of layer {layer} has no recorded end"
            part = Part(cause=Cause.UNFINISHED, ns=span.duration, detail=detail, node=None)
            result[layer] = (part,) if part.ns > 0 else ()
    return result


_Found = tuple[Cause, int, Callable[[], str], str | None]
"""A part before its phrase is written: most are empty."""


class _Wait:
    """One exposed wait beside its transfer: how much of it each delay of the transfer is good for."""

    def __init__(self, began: int, transfer: Transfer, wait: Span) -> None:
        self.began = began
        self.transfer = transfer
        self.start = wait.start
        self.exposed = max(0, wait.duration)
        # What of the wait came before the transfer had ended.
        self.held = max(0, min(transfer.end, wait.end) - wait.start)
        # One after the other: the link was free, the slot too, the hook was reached too, it started.
        self.link = min(transfer.link_free.time, transfer.start)
        self.slot = min(max(transfer.slot_free.time, self.link), transfer.start)
        self.hook = min(max(transfer.hook, self.slot), transfer.start)

    @property
    def queued(self) -> bool:
        """Whether the transfer before it was the last thing it had to wait for."""
        return self.hook == self.link and self.transfer.link_free.node is not None

    def need(self, start: int) -> int:
        """What the wait would be, had the transfer started at `start` and had no rank joined late."""
        left = max(0, self.held - self.transfer.skew)
        return min(max(0, start + self.transfer.own - self.start), left)

    def ends(self) -> tuple[_Found, ...]:
        """What does not depend on when the transfer started: late ranks, and compute that woke late."""
        node = self.transfer.node
        return (
            (Cause.PEER, min(self.held, self.transfer.skew), self.joined_late, node),
            (Cause.DISPATCH, self.exposed - self.held, self.woke_late, node),
        )

    def first(self, began: int, rank: int) -> tuple[_Found, ...]:
        """The rest, for the first transfer of a forward, which `rank` began last, at `began`."""
        node, start = self.transfer.node, self.transfer.start
        # Ranks compare their forwards before the first transfer, which then starts when the last has begun.
        shift = began - self.hook if self.hook < began <= start else 0
        peer = self.need(start) - self.need(start - shift)
        late = f"rank {rank} began the forward {_ms(began - self.began)} later"
        prologue = f"only the prologue runs beside {node}, which took {_ms(self.transfer.own)}"
        return (
            (Cause.PEER, peer, lambda: late, node),
            (Cause.FIRST, self.need(start) - peer, lambda: prologue, node),
        )

    def late(self, lag: "_Lag", usual: "_Usual") -> tuple[_Found, ...]:
        """The rest, for any other transfer: what would be gone, had it started when the link was free."""
        node, reader = self.transfer.node, self.transfer.slot_free.node
        start, hook, slot, link = map(self.need, (self.transfer.start, self.hook, self.slot, self.link))
        previous = lag.owed(self, link)
        return (
            (Cause.DISPATCH, start - hook, self.started_late, node),
            (Cause.HOOK, hook - slot, self.hooked_late, node),
            (Cause.SLOT, slot - link, self.slot_held, reader),
            (Cause.PREVIOUS, previous, partial(lag.detail, self), lag.node),
            (Cause.LINK, link - previous, partial(usual.detail, self), node),
        )

    def joined_late(self) -> str:
        """Phrase for a transfer that stood until another rank had joined it."""
        late = _ms(self.transfer.skew)
        return f"rank {self.transfer.late_rank} joined {self.transfer.node} {late} later"

    def woke_late(self) -> str:
        """Phrase for compute that did not go on when it could."""
        return f"compute went on {_ms(self.exposed - self.held)} after {self.transfer.node} had ended"

    def started_late(self) -> str:
        """Phrase for a transfer that nothing held any more."""
        return f"{self.transfer.node} began {_ms(self.transfer.start - self.hook)} after it could"

    def hooked_late(self) -> str:
        """Phrase for a transfer that could have begun, had the host handed it over."""
        idle = _ms(self.hook - self.slot)
        return f"{self.transfer.node} was handed over {self.at(self.hook)}, {idle} after link and slot were free"

    def slot_held(self) -> str:
        """Phrase for a transfer whose slot was still being read."""
        slot, reader = self.transfer.slot, self.transfer.slot_free.node
        return f"{reader} held slot {slot} until {self.at(self.slot)}"

    def at(self, time: int) -> str:
        """A time as a person reads it."""
        return f"{_ms(time - self.began)} into the forward"

    def gate(self) -> str:
        """Why the transfer left the link idle before it."""
        gaps = {
            self.hooked_late: self.hook - self.slot,
            self.slot_held: self.slot - self.link,
            self.started_late: self.transfer.start - self.hook,
        }
        return max(gaps, key=gaps.__getitem__)()


class _Usual:
    """How long a forward's transfers usually take: by the median transfer, and by the median byte."""

    def __init__(self, done: Iterable[Transfer]) -> None:
        sized = [t for t in done if t.bytes > 0]
        self.own = median([t.own for t in sized]) if sized else 0
        self.per_byte = median([t.own / t.bytes for t in sized]) if sized else 0.0

    def excess(self, transfer: Transfer) -> int:
        """How much longer a transfer took than one of its size and than most do."""
        return max(0, transfer.own - int(max(self.own, self.per_byte * transfer.bytes)))

    def detail(self, wait: _Wait) -> str:
        """Phrase for a transfer that started in time and was not done in time."""
        transfer = wait.transfer
        beside = max(0, wait.start - transfer.start)
        text = f"{transfer.node} took {_ms(transfer.own)}, and compute came for it after {_ms(beside)}"
        excess = self.excess(transfer)
        slow = excess * 2 > transfer.own
        return f"{text}; {_ms(excess)} over what is usual for its size" if slow else text


@dataclass(frozen=True, kw_only=True)
class _Lag:
    """By how much the link runs behind because of transfers that were hidden themselves.

    Without it the next transfer would start `ns` earlier. `most` is the share of `node`, which cost most.
    """

    ns: int = 0
    most: int = 0
    node: str | None = None
    reason: str = ""

    def owed(self, wait: _Wait, need: int) -> int:
        """How much of `need` is owed to the transfers before: those that were slow or late."""
        queued = wait.link - max(wait.transfer.slot_free.time, wait.transfer.hook)
        return min(need, self.ns, max(0, queued))

    def detail(self, wait: _Wait) -> str:
        """Phrase that names the transfer to look at."""
        return f"{wait.transfer.link_free.node} held the link until {wait.at(wait.link)}; {self.reason}"

    def after(self, wait: _Wait, usual: _Usual) -> "_Lag":
        """The lag behind the next transfer. What compute stood waiting for is paid, and no lag any more."""
        before = self if wait.queued else _Lag()
        transfer, excess = wait.transfer, usual.excess(wait.transfer)
        late = 0 if transfer.first else transfer.start - wait.link
        ns = before.ns + transfer.skew + excess + late - wait.exposed
        if ns <= 0:
            return _Lag()
        most = max(transfer.skew, excess, late)
        if most <= before.most:
            return _Lag(ns=ns, most=before.most, node=before.node, reason=before.reason)
        if most == transfer.skew:
            reason = wait.joined_late()
        elif most == excess:
            reason = f"{transfer.node} took {_ms(transfer.own)}, {_ms(excess)} over what is usual for its size"
        else:
            reason = wait.gate()
        return _Lag(ns=ns, most=most, node=transfer.node, reason=reason)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"

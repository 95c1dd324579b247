"""Transport between processes of one host: every reader copies once, out of the owner's own memory."""

import ctypes
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from kvpp_dag.errors import DivergenceError, LayoutError, TransferError
from kvpp_dag.runtime.links import Exchange, Link, connect
from kvpp_dag.runtime.segments import Place, Segments, map_segment
from kvpp_dag.runtime.transport import Ranges, as_bytes

_SOURCE, _DONE = 1, 2
_MESSAGE = struct.Struct("<BQQQQ")
"""Kind, number of the broadcast, its bytes; for a source also segment and offset."""

_TOKEN_BYTES = hashlib.sha256().digest_size


class SharedMemoryTransport:
    """One rank's end of a group whose ranks are processes of one host, on host memory.

    A broadcast goes like this: the owner tells every reader where its bytes lie, each reader copies them
    into its own buffer and says so, and the owner's call returns when all have. So while the source is being read
    the owner's transfer stream is busy with it, and nobody writes there before the completion event.
    What is sent has to come from `allocate`, which lets the other ranks read it; they map each segment once,
    when they first meet it. Receive from there too: a copy is fastest, by up to 3 x, between buffers that begin
    alike within a page. Nobody polls: ranks block in sockets, and learn at once of a peer that died.

    After a failure the group is unusable, and the peers' calls fail too. Comparing has links of its own, since it
    may run on another thread than the broadcasts.
    """

    def __init__(self, exchange: Exchange, *, rank: int, ranks: Sequence[int], timeout: float) -> None:
        """Link up with the other ranks: all of `ranks` (global, for messages), in group order, call this together.

        `rank` is this one's place among them. `exchange` gathers a few bytes of every rank, once. `timeout`
        (seconds) bounds every wait for a peer. Raises as `links.connect` does.
        """
        self.rank = rank
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self._segments = Segments()
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}
        self._told: set[tuple[int, int]] = set()
        self._sequence = 0
        self._broken: TransferError | None = None
        names = [f"rank {global_rank}" for global_rank in self.ranks]
        self._data, self._control = connect(exchange, rank=rank, names=names, meshes=2, timeout=timeout)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Zeroed host memory that the other ranks can read: uint8 [nbytes]. See `Segments.allocate`."""
        return self._segments.allocate(nbytes)

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        """The broadcast of `view` from group rank `owner`.

        Raises LayoutError also for an owner's view that lies outside the memory of `allocate`, and for a
        reader's that is not on the host.
        """
        whole = ((0, view.nbytes),)
        return partial(self.prepare_ranges(view, owner), whole) if view.nbytes else _nothing

    def prepare_ranges(self, view: torch.Tensor, owner: int) -> Callable[[Ranges], None]:
        """The broadcast of some ranges of `view`, which are one message, and a copy each.

        Raises as `prepare` does; the call also raises LayoutError for a range outside the view.
        """
        name = f"The cache sent by rank {self.ranks[owner]}"
        flat = as_bytes(view, name)
        if owner == self.rank:
            return partial(self._send, self._segments.find(flat, name))
        if flat.device.type != "cpu":
            raise LayoutError(
                f"{name} is to arrive on {flat.device}, and shared memory carries it to host memory only; set "
                "the transport to process_group."
            )
        return partial(self._receive, flat, owner, self._data[owner])

    def agree(self, token: bytes) -> None:
        """Send a digest of `token` to every rank and compare theirs."""
        mine = hashlib.sha256(token).digest()
        with self._failing("could not compare their forwards"):
            for link in self._control.values():
                link.send(mine)
            theirs = {rank: link.receive(_TOKEN_BYTES)[0] for rank, link in self._control.items()}
        differing = sorted(self.ranks[rank] for rank, token in theirs.items() if token != mine)
        if differing:
            raise DivergenceError(
                f"Rank {self.ranks[self.rank]} and ranks {differing} of one KVPP group do not run the "
                "same forward; every rank must see the same scheduler output and begin the same forwards."
            )

    def close(self) -> None:
        """Leave the group; a peer that still waits for this rank gets an error."""
        for links in (self._data, self._control):
            for link in links.values():
                link.close()
        self._segments.close()

    def _send(self, place: Place, ranges: Ranges) -> None:
        nbytes = _length(ranges, place.nbytes)
        self._sequence += 1
        source = _MESSAGE.pack(_SOURCE, self._sequence, nbytes, place.segment, place.offset)
        with self._failing("could not broadcast"):
            for reader, link in self._data.items():
                new = (reader, place.segment) not in self._told
                link.send(source, self._segments.file(place.segment) if new else None)
                self._told.add((reader, place.segment))
            for link in self._data.values():
                message, _ = link.receive(_MESSAGE.size)
                self._check(_MESSAGE.unpack(message)[:3], (_DONE, self._sequence, nbytes), link)

    def _receive(self, flat: torch.Tensor, owner: int, link: Link, ranges: Ranges) -> None:
        nbytes = _length(ranges, flat.numel())
        self._sequence += 1
        with self._failing("could not broadcast"):
            message, file = link.receive(_MESSAGE.size)
            kind, sequence, sent, segment, offset = _MESSAGE.unpack(message)
            if file is not None:
                self._mapped[owner, segment] = map_segment(file)
            what = (kind, sequence, sent)
            if what == (_SOURCE, self._sequence, nbytes):
                _copy(flat, self._source(owner, segment), offset, ranges)
            # The owner hears of it even if it differs, so that both ends say why.
            link.send(_MESSAGE.pack(_DONE, self._sequence, nbytes, 0, 0))
            self._check(what, (_SOURCE, self._sequence, nbytes), link)

    def _source(self, owner: int, segment: int) -> torch.Tensor:
        source = self._mapped.get((owner, segment))
        if source is None:  # the kernel drops an open file that its receiver has no number left for
            raise TransferError(
                f"The memory that rank {self.ranks[owner]} sends from did not arrive on rank "
                f"{self.ranks[self.rank]}, whose process may have too many open files; raise ulimit -n."
            )
        return source

    def _check(self, found: tuple[int, ...], expected: tuple[int, ...], link: Link) -> None:
        if found != expected:
            raise DivergenceError(
                f"Rank {self.ranks[self.rank]} is at {_described(expected)} and its peer {link.peer} came "
                f"with {_described(found)}: the ranks of one KVPP group do not run the same forward."
            )

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Run a collective; once one has failed, let every later one fail, here and there."""
        if self._broken is not None:
            raise TransferError(
                f"The ranks {self.ranks} {what}, since an earlier collective failed: {self._broken}"
            ) from self._broken
        try:
            yield
        except Exception as error:
            kind = type(error) if isinstance(error, TransferError) else TransferError
            self._broken = kind(f"The ranks {self.ranks} {what}: {error}")
            for links in (self._data, self._control):
                for link in links.values():
                    link.hang_up()
            raise self._broken from error


def _length(ranges: Ranges, size: int) -> int:
    """Bytes of all `ranges`; raises LayoutError unless they lie within a view of `size` bytes."""
    length = 0
    for start, stop in ranges:
        if not 0 <= start <= stop <= size:
            raise LayoutError(
                f"Bytes {start} to {stop} of a view of {size} bytes were to be sent; expected a range within it."
            )
        length += stop - start
    return length


def _copy(into: torch.Tensor, source: torch.Tensor, offset: int, ranges: Ranges) -> None:
    """A memmove of this thread a range, without the interpreter lock: torch's copy would use the engine's cores."""
    if offset + into.numel() > source.numel():
        raise DivergenceError(
            f"A peer sent {into.numel()} bytes at {offset} of a segment of {source.numel()}: it runs another "
            "version of kvpp_dag."
        )
    target, origin = into.data_ptr(), source.data_ptr() + offset
    for start, stop in ranges:
        ctypes.memmove(target + start, origin + start, stop - start)


def _described(message: tuple[int, ...]) -> str:
    kind, sequence, nbytes = message
    end = "sender" if kind == _SOURCE else "receiver"
    return f"broadcast {sequence} of {nbytes} bytes as its {end}"


def _nothing() -> None:
    """The broadcast of an empty view."""

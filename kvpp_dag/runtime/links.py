"""Links between the ranks of a group on one host: a Unix socket per pair, for short messages and open files.

A socket blocks without using a core, has a timeout, and tells at once when the process at its other end is
gone. Addresses are in Linux's abstract namespace: no file is left behind.
"""

import hashlib
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpp_dag.errors import ConfigError, TransferError

Exchange = Callable[[bytes], Sequence[bytes]]
"""Given some bytes, as many on every rank, returns what every rank gave, in group order."""

Links = dict[int, "Link"]
"""The links of one rank by the group rank of the peer."""

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"<{_SECRET_BYTES}sII")
_PEER_CREDENTIALS = struct.Struct("iII")

_HELLO_SECONDS = 1.0
"""How long a caller may be silent: a peer says hello at once, and a stranger must not keep the peers waiting."""


class Link:
    """One end of the socket to the peer that messages call `peer`.

    Every wait for the peer is bounded by `timeout` seconds.
    """

    def __init__(self, end: socket.socket, peer: str, timeout: float) -> None:
        self._end = end
        self._end.settimeout(timeout)
        self.peer = peer

    def send(self, message: bytes, file: int | None = None) -> None:
        """Send a message and, with it, an open file. Raises TransferError."""
        try:
            if file is None:
                self._end.sendall(message)
            else:
                socket.send_fds(self._end, [message], [file])
        except OSError as error:
            raise self._failure(error) from error

    def receive(self, nbytes: int) -> tuple[bytes, int | None]:
        """The next message, of `nbytes`, and the file that came with it. Raises TransferError."""
        message, file = b"", None
        try:
            while len(message) < nbytes:
                part, files, _, _ = socket.recv_fds(
                    self._end, nbytes - len(message), 1, socket.MSG_CMSG_CLOEXEC
                )
                if not part:
                    raise ConnectionError("the link is closed")
                message += part
                file = files[0] if files else file
        except OSError as error:
            raise self._failure(error) from error
        return message, file

    def hang_up(self) -> None:
        """Let both ends fail from now on, also one that is waiting in another thread."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer has gone already

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _failure(self, error: OSError) -> TransferError:
        if isinstance(error, TimeoutError):
            return TransferError(
                f"The peer {self.peer} did not come within the timeout; it hangs, is slower than that, or "
                "does not run this forward."
            )
        return TransferError(
            f"The peer {self.peer} is gone ({error}): it has died or given up; see its log."
        )


def connect(
    exchange: Exchange, *, rank: int, names: Sequence[str], meshes: int, timeout: float
) -> tuple[Links, ...]:
    """Link this rank to every other one `meshes` times; all ranks call this together.

    `names[i]` is what messages call rank i. Only processes of the same user that took part in `exchange`
    are let in. Raises ConfigError where there are no such sockets, TransferError if a peer cannot be
    reached within `timeout` seconds.
    """
    _check_platform()
    deadline = time.monotonic() + timeout
    linked: tuple[Links, ...] = tuple({} for _ in range(meshes))
    address, secret = secrets.token_hex(16), secrets.token_bytes(_SECRET_BYTES)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0kvpp-{address}")
        listener.listen(socket.SOMAXCONN)  # a full queue would turn callers away
        told = [(t[:-_SECRET_BYTES], t[-_SECRET_BYTES:]) for t in exchange(address.encode() + secret)]
        try:
            for mesh, links in enumerate(linked):
                for peer in range(rank):
                    there, theirs = told[peer]
                    end = _dial(there, _HELLO.pack(theirs, rank, mesh), deadline)
                    links[peer] = Link(end, names[peer], timeout)
            while any(len(links) < len(names) - 1 for links in linked):
                listener.settimeout(_left(deadline))
                end, _ = listener.accept()
                if hello := _admit(end, secret, deadline):
                    peer, mesh = hello
                    linked[mesh][peer] = Link(end, names[peer], timeout)
                else:
                    end.close()
        except OSError as error:
            missing = [n for i, n in enumerate(names) if i != rank and any(i not in li for li in linked)]
            raise TransferError(
                f"{names[rank]} could not link up with {', '.join(missing)} on this host: {error}. See "
                "their logs; if they run in other containers, set the transport to process_group."
            ) from error
    return linked


def host_identity() -> bytes:
    """32 bytes that two processes share exactly if `connect` can link them: host, network, user."""
    if sys.platform != "linux":
        return secrets.token_bytes(32)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    network = os.readlink("/proc/self/ns/net")
    return hashlib.sha256(repr((boot, network, os.geteuid())).encode()).digest()


def _dial(address: bytes, hello: bytes, deadline: float) -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(_left(deadline))
    end.connect(b"\0kvpp-" + address)
    end.sendall(hello)
    return end


def _admit(end: socket.socket, secret: bytes, deadline: float) -> tuple[int, int] | None:
    """Rank and mesh of a peer that has called, or None if it is a stranger."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        return None
    end.settimeout(min(_HELLO_SECONDS, _left(deadline)))
    try:
        hello = end.recv(_HELLO.size, socket.MSG_WAITALL)
    except TimeoutError:
        return None
    if len(hello) < _HELLO.size:
        return None
    theirs, rank, mesh = _HELLO.unpack(hello)
    return (rank, mesh) if secrets.compare_digest(theirs, secret) else None


def _left(deadline: float) -> float:
    """Seconds until `deadline`, at least a few: a peer that has come already is never late."""
    return max(deadline - time.monotonic(), 0.001)


def _check_platform() -> None:
    if sys.platform != "linux":
        raise ConfigError(
            f"Links between ranks of one host need Linux, and this is {sys.platform}; set the transport to "
            "process_group."
        )

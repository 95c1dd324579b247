"""Streams and events of an accelerator: cuda, npu and xpu by one code path.

Everything here is submitted by the host and done by the device later. A wait is between streams of the
device and never blocks the host, unless it is asked to (`Completion.HOST`). What the host learns of a
failure at once, such as a collective that cannot be submitted, is kept as the stream's error and travels
with the events recorded after it, as on host streams. What only the device learns surfaces where the host
looks at an event: at the latest when the forward after the next begins, or at an abort.
"""

import time
from enum import StrEnum
from typing import cast

import torch

from kvpp_dag.errors import TransferError
from kvpp_dag.runtime.device_times import AcceleratorTimes, Anchor
from kvpp_dag.runtime.native import NativeEvent, NativeStream
from kvpp_dag.runtime.streams import Work
from kvpp_dag.runtime.tape import Stamp, Tape

FIRST_PAUSE, LONGEST_PAUSE = 20e-6, 1e-3
"""Seconds between two looks at an event that the host waits for."""


class Completion(StrEnum):
    """Who waits for a completion event: the compute stream alone, or the host as well."""

    STREAM = "stream"
    HOST = "host"


class AcceleratorEvent:
    """An event of an accelerator's stream; `native` is torch's."""

    __slots__ = ("error", "name", "native")

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.native = NativeEvent(device)

    def query(self) -> bool:
        """Whether the point was reached. Raises TransferError if the device has failed."""
        try:
            return self.native.query()
        except RuntimeError as error:
            raise self._device_failed(error) from error

    def synchronize(self, timeout: float) -> None:
        """Block the host; raises as every event does.

        The answers of `query` serve the timeout alone: the order rests on the event itself.
        """
        if self.error is not None:
            raise self.error
        deadline = time.monotonic() + timeout
        pause = FIRST_PAUSE
        while not self.query():
            if time.monotonic() > deadline:
                raise TransferError(
                    f"{self.name} was not reached within {timeout:g} s; a peer may have died or run "
                    "another forward. See the logs of the other ranks of this group."
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        try:
            self.native.synchronize()
        except RuntimeError as error:
            raise self._device_failed(error) from error

    def _device_failed(self, error: RuntimeError) -> TransferError:
        return TransferError(
            f"The device failed before {self.name} was reached: {error}. Its state is lost; restart "
            "the engine."
        )


class CurrentStream:
    """The engine's compute stream: the stream that is current where a hook is called.

    It is looked up at every call, because the engine submits the attention of a layer right after the
    hook and to that very stream. With `Completion.HOST` a wait blocks the host as well, for at most
    `timeout` seconds.
    """

    error = None

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        timeout: float,
        completion: Completion = Completion.STREAM,
    ) -> None:
        self.name = name
        self._device = device
        self._timeout = timeout
        self._host_waits = completion is Completion.HOST
        self._end = self.event(f"the end of stream {name!r}")

    def event(self, name: str) -> AcceleratorEvent:
        """A new event."""
        return AcceleratorEvent(name, self._device)

    def launch(self, work: Work) -> None:
        """Call `work`, which submits to the current stream."""
        work()

    def record(self, event: AcceleratorEvent) -> None:
        """Let `event` be reached once everything submitted to the current stream has run."""
        event.error = None
        event.native.record()

    def wait(self, event: AcceleratorEvent) -> None:
        """Let nothing submitted later run before `event` is reached; raise what the host knows failed."""
        if event.error is not None:
            raise event.error
        event.native.wait()
        if self._host_waits:
            event.synchronize(self._timeout)

    def stamp(self, tape: Tape, cell: int) -> Stamp:
        """Notes the device's time on the current stream."""
        return _times_of(tape, self._device).stamp(cell)

    def synchronize(self, timeout: float) -> None:
        """Block the host until everything submitted to the current stream so far has run."""
        self.record(self._end)
        self._end.synchronize(timeout)


class AcceleratorStream:
    """A stream of its own on `device`: the transfer stream.

    `launch` calls the work at once with this stream current, so that what it submits, collectives
    included, is ordered by this stream. Once that has raised, later work is not submitted any more.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._device = device
        self._native = NativeStream(device=device)
        self._end = self.event(f"the end of stream {name!r}")

    def event(self, name: str) -> AcceleratorEvent:
        """A new event."""
        return AcceleratorEvent(name, self._device)

    def launch(self, work: Work) -> None:
        """Call `work`, which submits to this stream."""
        if self.error is not None:
            return
        try:
            with self._native:
                work()
        except Exception as error:
            self.error = error

    def record(self, event: AcceleratorEvent) -> None:
        """Let `event` be reached once everything submitted before has run."""
        event.error = self.error
        event.native.record(self._native)

    def wait(self, event: AcceleratorEvent) -> None:
        """Let nothing submitted later run before `event` is reached."""
        self.error = self.error or event.error
        event.native.wait(self._native)

    def stamp(self, tape: Tape, cell: int) -> Stamp:
        """Notes the device's time, when launched on this stream."""
        return _times_of(tape, self._device).stamp(cell)

    def synchronize(self, timeout: float) -> None:
        """Block the host until everything submitted so far has run; raise the stream's error."""
        self.record(self._end)
        self._end.synchronize(timeout)


def _times_of(tape: Tape, device: torch.device) -> AcceleratorTimes:
    """The cells that `device` fills in on `tape`; all tapes of an observer share one anchor."""
    if tape.device is None:
        anchor: Anchor = tape.shared.setdefault(device, Anchor(device=device, clock=tape.clock))
        tape.device = AcceleratorTimes(tape, anchor)
    return cast("AcceleratorTimes", tape.device)

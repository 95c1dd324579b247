"""The callback protocol through which `trace` watches the runtime.

While a forward runs, the bound program notes its times on a tape by itself; an observer is called only
where forwards begin and end. It only watches: whatever is wrong with a run is raised by the run, never by
its observer.
"""

import logging
from typing import Protocol

from kvpp_dag.graph import Graph
from kvpp_dag.runtime.tape import Tape

logger = logging.getLogger("kvpp_dag")


class Observer(Protocol):
    """What makes tapes, and is told when a forward begins and ends on one.

    A forward may have gone wrong in any way when it is told of it: waits may have been dropped, so that a
    device is not where it should be, and a device may have failed. A time that it then cannot learn is
    missing, and it says so where it shows times. If it raises all the same, the error is logged, the run goes
    on, and it is told nothing more.
    """

    def tape(self, graph: Graph) -> Tape:
        """A tape for a program that is about to be bound."""

    def forward_began(
        self, tape: Tape, number: int, needed_blocks: int | None, sent_blocks: int | None
    ) -> None:
        """Forward `number` (counted from 1) of this rank begins; what was on `tape` is over.

        `needed_blocks` is how many blocks the batch's history uses, if the engine has said so, and
        `sent_blocks` how many are sent of every bundle, if it sends blocks.
        """

    def forward_ended(self, tape: Tape, error: BaseException | None) -> None:
        """The forward on `tape` ended, or was aborted because of `error`; a device may still run it."""


class Watch:
    """Tells `observer` of forwards, until it raises: then it is told nothing more, and the log says why."""

    def __init__(self, observer: Observer) -> None:
        self._observer: Observer | None = observer

    def began(self, tape: Tape, number: int, needed_blocks: int | None, sent_blocks: int | None) -> None:
        """See `Observer.forward_began`."""
        if self._observer is None:
            tape.clear()  # the program goes on noting times
            return
        try:
            self._observer.forward_began(tape, number, needed_blocks, sent_blocks)
        except Exception:
            self._give_up(f"forward {number} began")
            tape.clear()

    def ended(self, tape: Tape, error: BaseException | None) -> None:
        """See `Observer.forward_ended`."""
        if self._observer is None:
            return
        try:
            self._observer.forward_ended(tape, error)
        except Exception:
            self._give_up("a forward ended")

    def _give_up(self, when: str) -> None:
        logger.exception(
            "The observer %s raised when it was told that %s; the run goes on, and it is told nothing more.",
            type(self._observer).__name__,
            when,
        )
        self._observer = None

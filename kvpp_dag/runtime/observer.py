"""The callback protocol through which `trace` watches the runtime.

While a forward runs, the bound program notes its times on a tape by itself; an observer is called only
where forwards begin and end, and must not raise.
"""

from typing import Protocol

from kvpp_dag.graph import Graph
from kvpp_dag.runtime.tape import Tape


class Observer(Protocol):
    """What makes tapes, and is told when a forward begins and ends on one."""

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

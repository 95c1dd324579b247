"""The control of an equality test: a transport that leaves some components of a bundle out."""

from collections.abc import Callable, Collection

import torch

from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime import Transport


class PartialTransport:
    """Sends only the components named in `sent`; with all of them, the whole bundle at once.

    A bundle is known by its size, so bundles of one size must have the same components.
    """

    def __init__(
        self, transport: Transport, plan: StagePlan, num_blocks: int, sent: Collection[str]
    ) -> None:
        self.rank, self.size, self.agree = transport.rank, transport.size, transport.agree
        self._transport = transport
        self._parts: dict[int, list[slice]] = {}
        for bundle in plan.bundles:
            components = bundle.spec.components
            starts = [bundle.component_offset(c.name, num_blocks) for c in components]
            whole = bundle.bytes_per_block * num_blocks
            parts = [
                slice(start, start + c.bytes_per_block * num_blocks)
                for start, c in zip(starts, components, strict=True)
                if c.name in sent
            ]
            self._parts[whole] = [slice(whole)] if len(parts) == len(components) else parts

    def prepare(self, view: torch.Tensor, owner: int) -> Callable[[], None]:
        calls = [self._transport.prepare(view[part], owner) for part in self._parts[view.numel()]]

        def broadcast() -> None:
            for call in calls:
                call()

        return broadcast

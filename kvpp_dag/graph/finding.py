"""What verification finds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One reason why a graph is unsound.

    `rule` is `race`, `deadlock`, `content`, `unjoined` or `collectives`; `nodes` are the nodes
    concerned (for a race exactly the two that no path orders).
    """

    rule: str
    rank: int
    nodes: tuple[str, ...]
    message: str

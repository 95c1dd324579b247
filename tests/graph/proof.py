"""The proof, tested: break graphs in every way at hand, ask `verify`, and ask the brute-force judge.

A mutant is unsafe if the judge finds an execution that goes wrong. `verify` must reject exactly those. Every
comparison is counted by category; one where the two differ is a disagreement. Where an edge was removed from
a compiled forward, the judge also demands that owners send precisely what the forward before wrote.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from kvpp_dag.errors import UnsoundGraphError
from kvpp_dag.graph import Graph, Policy, ensure_sound, to_text, verify, verify_group
from tests.builders import forward, group
from tests.graph.mutants import (
    edge_removals,
    owner_swaps,
    places_changed,
    slot_changes,
    transfer_swaps,
)
from tests.graph.random_dags import safe_graphs
from tests.judge import fault_of

EDGE, SWAP, SLOT = "edge removed", "transfers swapped", "slot or buffer changed"
PLACE = "issued earlier or later"
CHANGES: dict[str, Callable[[Graph], Iterable[Graph]]] = {
    EDGE: edge_removals,
    SWAP: transfer_swaps,
    SLOT: slot_changes,
}
FORWARD, PACKED, GROUP, RANDOM = "forward", "packed forward", "group, one rank or all", "random DAG"
NO_HISTORY, ANOTHER = "before and after one without history", "before and after another"
WHOLE = "before and after one that is not packed"


judged = cache(fault_of)
"""The judge's verdict; kept, since the controls ask it about the same mutants again."""


@dataclass(kw_only=True)
class Count:
    """Verdicts of one category; `examples` are mutants on which verifier and judge differ."""

    rejected: int = 0
    accepted: int = 0
    unsafe: int = 0
    safe: int = 0
    disagreements: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def mutants(self) -> int:
        return self.rejected + self.accepted


class Tally:
    """Counts by what was broken and by change."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Count] = {}

    def compare(
        self, broken: str, change: str, rejected: bool, fault: str | None, graphs: Sequence[Graph]
    ) -> None:
        count = self.counts.setdefault((broken, change), Count())
        count.rejected += rejected
        count.accepted += not rejected
        count.unsafe += fault is not None
        count.safe += fault is None
        if rejected != (fault is not None):
            count.disagreements += 1
            if count.disagreements == 1:
                count.examples.append("\n".join([str(fault), *map(to_text, graphs)]))


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is swept: forwards of one rank over everything, groups of whole ranks, random graphs."""

    layers: Sequence[int]
    depths: Sequence[int]
    ranks: Sequence[int]
    groups: Sequence[tuple[int, int]]
    packed: Sequence[tuple[int, int]]
    """Numbers of layers and chunks of packed forwards of one of two ranks, at depth 1."""
    random_graphs: int


TINY = Sizes(
    layers=(2,), depths=(1, 2), ranks=(2,), groups=((2, 2),), packed=((2, 1), (1, 2)), random_graphs=40
)
SMALL = Sizes(
    layers=(1, 2, 3, 4),
    depths=(1, 2, 3),
    ranks=(2, 3),
    groups=((2, 2), (3, 2)),
    packed=((1, 1), (2, 1), (1, 2), (2, 2)),
    random_graphs=60,
)
LARGE = Sizes(
    layers=(1, 2, 3, 4, 5),
    depths=(1, 2, 3),
    ranks=(2, 3, 4),
    groups=((2, 2), (3, 2), (4, 2), (2, 3)),
    packed=((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3), (2, 3)),
    random_graphs=400,
)


def prove(sizes: Sizes, seed: int = 0) -> Tally:
    """Compare verifier and judge on every mutant of every graph within `sizes`."""
    tally = Tally()
    _forwards(tally, sizes)
    _packed(tally, sizes)
    _groups(tally, sizes)
    _random(tally, sizes, seed)
    return tally


def _distinct(graph: Graph, mutants: Iterable[Graph]) -> Iterator[Graph]:
    yield from {mutant: None for mutant in mutants if mutant != graph}


def _forwards(tally: Tally, sizes: Sizes) -> None:
    seen = set()
    for policy, layers, depth, ranks in product(Policy, sizes.layers, sizes.depths, sizes.ranks):
        for rank in range(ranks):
            graph = forward(layers, ranks, rank=rank, policy=policy, depth=depth)
            without = forward(layers, ranks, rank=rank, policy=policy, depth=depth, history=False)
            for change, mutate in CHANGES.items():
                for mutant in _distinct(graph, mutate(graph)):
                    if (mutant.nodes, rank) not in seen:
                        seen.add((mutant.nodes, rank))
                        _alone_and_mixed(tally, FORWARD, NO_HISTORY, change, mutant, without)


def _packed(tally: Tally, sizes: Sizes) -> None:
    for policy, (layers, chunks), rank in product(Policy, sizes.packed, (0, 1)):
        graph = forward(layers, rank=rank, policy=policy, chunks=chunks)
        whole = forward(layers, rank=rank, policy=policy)
        for change, mutate in CHANGES.items():
            for mutant in _distinct(graph, mutate(graph)):
                _alone_and_mixed(tally, PACKED, WHOLE, change, mutant, whole)


def _alone_and_mixed(
    tally: Tally, broken: str, beside: str, change: str, mutant: Graph, other: Graph
) -> None:
    """A mutant twice in a row, and in every order with another kind of forward."""
    exact = broken in (FORWARD, PACKED) and change == EDGE
    fault = judged(((mutant, mutant),), exact=exact)
    tally.compare(f"{broken}, twice in a row", change, bool(verify(mutant)), fault, [mutant])
    fault = fault or judged(((mutant, other),), exact=exact) or judged(((other, mutant),), exact=exact)
    tally.compare(f"{broken}, {beside}", change, _refused([mutant, other]), fault, [mutant, other])


def _refused(kinds: Sequence[Graph]) -> bool:
    try:
        ensure_sound(kinds)
    except UnsoundGraphError:
        return True
    return False


def _groups(tally: Tally, sizes: Sizes) -> None:
    """Over 0 blocks, all transfers are of one size; what is issued earlier or later is of any."""
    for policy, (layers, ranks), depth, blocks in product(
        Policy, sizes.groups, sizes.depths[:2], (0, 4)
    ):
        graphs = group(layers, ranks, policy=policy, depth=depth, num_blocks=blocks)
        for change, mutate in CHANGES.items():
            for rank, graph in enumerate(graphs):
                for mutant in _distinct(graph, mutate(graph)):
                    _group(tally, change, [*graphs[:rank], mutant, *graphs[rank + 1 :]])
        if blocks:
            _issued_elsewhere(tally, graphs)
        for swapped in zip(*(transfer_swaps(graph) for graph in graphs), strict=True):
            _group(tally, SWAP, swapped)
        for swaps in zip(*(owner_swaps(graph) for graph in graphs), strict=True):
            for swapped in [*zip(*swaps, strict=True), [swaps[0][1], *graphs[1:]]]:
                if list(swapped) != graphs:
                    _group(tally, "owners swapped", swapped)


def _issued_elsewhere(tally: Tally, graphs: Sequence[Graph]) -> None:
    """On the first rank, and on all ranks alike."""
    for moved in zip(*map(places_changed, graphs), strict=True):
        if moved[0] != graphs[0]:
            _group(tally, PLACE, [moved[0], *graphs[1:]])
            _group(tally, PLACE, moved)


def _group(tally: Tally, change: str, graphs: Sequence[Graph]) -> None:
    fault = judged(tuple((graph, graph) for graph in graphs), exact=change == EDGE)
    tally.compare(GROUP, change, bool(verify_group(graphs)), fault, graphs)


def _random(tally: Tally, sizes: Sizes, seed: int) -> None:
    rng = random.Random(seed)
    for graph in safe_graphs(rng, sizes.random_graphs):
        other = next(o for o in safe_graphs(rng, 1000) if not _fault_of_kinds(graph, o))
        for change, mutate in CHANGES.items():
            for mutant in _distinct(graph, mutate(graph)):
                _alone_and_mixed(tally, RANDOM, ANOTHER, change, mutant, other)


def _fault_of_kinds(a: Graph, b: Graph) -> str | None:
    return judged(((a, b),)) or judged(((b, a),))

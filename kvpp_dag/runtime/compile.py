"""Compile and verify the forwards of one rank."""

from collections.abc import Sequence

from kvpp_dag.errors import UnsoundGraphError
from kvpp_dag.graph import (
    Collectives,
    Graph,
    Policy,
    build_collectives,
    build_forward,
    ensure_sound,
)
from kvpp_dag.graph.collectives import collective_order
from kvpp_dag.plan import StagePlan
from kvpp_dag.runtime.payload import FULL, NOTHING, Kind, Way


def compile_forwards(
    plan: StagePlan, rank: int, num_blocks: int, policy: Policy, chunks: Sequence[int] = ()
) -> dict[Kind, Graph]:
    """The graphs of `rank` by kind, verified: one that sends nothing, one of whole bundles, and one per count
    of chunks that blocks may be packed into.

    Raises UnsoundGraphError if any has a race or deadlock, alone or across two consecutive forwards in any
    order, or if the ranks would issue different collectives.
    """
    kinds: list[Kind] = [NOTHING, FULL, *((Way.PACKED, count) for count in chunks)]
    graphs: dict[Kind, Graph] = {}
    issued: dict[Kind, list[Collectives]] = {}
    for kind in kinds:
        way, pieces = kind
        blocks = plan.staging_blocks(num_blocks) if pieces else num_blocks
        graphs[kind] = build_forward(
            plan,
            rank=rank,
            num_blocks=blocks,
            history=way is not Way.NOTHING,
            policy=policy,
            chunks=pieces,
        )
        issued[kind] = build_collectives(plan, num_blocks=blocks, policy=policy, chunks=pieces)
    ensure_sound(list(graphs.values()))
    if plan.ranks > 1:
        for kind in kinds[1:]:
            _ensure_equal(graphs[kind], issued[kind])
    return graphs


def _ensure_equal(graph: Graph, issued: Sequence[Collectives]) -> None:
    """Compare what every rank of the plan issues, and what a graph issues with that of another rank.

    Every rank derives `issued` from the plan alone, so that graphs which each equal it on their own rank
    equal each other, and none has to be built on all ranks.
    """
    pair = (graph, issued[graph.rank - 1])
    findings = (*collective_order(issued), *collective_order(pair))
    if findings:
        raise UnsoundGraphError(findings[0].message, findings)

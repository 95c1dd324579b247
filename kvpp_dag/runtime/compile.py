"""Compile and verify the forwards of one rank."""

from kvpp_dag.errors import UnsoundGraphError
from kvpp_dag.graph import Graph, Policy, build_forward, ensure_sound
from kvpp_dag.graph.verify import collective_order
from kvpp_dag.plan import StagePlan


def compile_forwards(plan: StagePlan, rank: int, num_blocks: int, policy: Policy) -> tuple[Graph, Graph]:
    """The graphs of `rank` without and with history, in that order, verified.

    Raises UnsoundGraphError if either has a race or deadlock, alone or across two consecutive forwards
    in any order, or if the ranks would issue different collectives.
    """

    def build(of_rank: int, history: bool) -> Graph:
        return build_forward(plan, rank=of_rank, num_blocks=num_blocks, history=history, policy=policy)

    graphs = (build(rank, False), build(rank, True))
    ensure_sound(graphs)
    findings = tuple(collective_order([build(r, True) for r in range(plan.ranks)]))
    if findings:
        raise UnsoundGraphError(findings[0].message, findings)
    return graphs

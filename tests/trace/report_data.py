"""Recordings of a group whose forwards are played on a virtual clock, for the tests of the report."""

import random
from dataclasses import dataclass, field

from kvpp_dag.graph import Kind, Node, Policy, build_forward
from kvpp_dag.plan import CacheSpec, Component, StagePlan, plan_stage
from kvpp_dag.trace.records import ForwardRecord, Recording, Span

BYTES_PER_BLOCK = 18_432
BLOCKS = 256


def make_plan(layers: int, ranks: int, *, depth: int = 1, names: list[str] | None = None) -> StagePlan:
    """Every third layer has an indexer cache as well; `names` replaces the usual layer names."""
    main = Component(name="main", bytes_per_block=BYTES_PER_BLOCK)
    indexer = Component(name="indexer", bytes_per_block=BYTES_PER_BLOCK // 4)
    return plan_stage(
        [
            CacheSpec(
                layer=names[i] if names else f"model.layers.{i}.self_attn.attn",
                index=i,
                components=(main, indexer) if i % 3 == 0 else (main,),
            )
            for i in range(layers)
        ],
        ranks=ranks,
        depth=depth,
    )


@dataclass
class _Rank:
    """The clocks of one rank, in nanoseconds, and what it recorded."""

    began: int
    compute: int = 0
    transfer: int = 0
    submitted: dict[str, int] = field(default_factory=dict)
    spans: dict[str, Span] = field(default_factory=dict)
    waits: dict[str, Span] = field(default_factory=dict)


def make_recordings(
    *,
    layers: int = 12,
    ranks: int = 2,
    forwards: int = 3,
    stage: int = 0,
    clock: str = "host-1/monotonic",
    policy: Policy = Policy.ON_ACQUIRE,
    names: list[str] | None = None,
    seed: int = 1,
) -> tuple[Recording, ...]:
    """Forwards with a slower link in the later ones, so that their waits grow; the first has no history."""
    plan = make_plan(layers, ranks, names=names)
    rng = random.Random(seed)
    played = [_play(plan, number, policy, rng) for number in range(forwards)]
    return tuple(
        Recording(
            rank=rank,
            ranks=ranks,
            stage=stage,
            clock=clock,
            num_blocks=BLOCKS,
            plan=plan,
            forwards=tuple(forward[rank] for forward in played),
        )
        for rank in range(ranks)
    )


def _play(plan: StagePlan, number: int, policy: Policy, rng: random.Random) -> list[ForwardRecord]:
    graphs = [
        build_forward(plan, rank=rank, num_blocks=BLOCKS, history=number > 0, policy=policy)
        for rank in range(plan.ranks)
    ]
    began = 5_000_000_000 + number * 100_000_000
    clocks = [_Rank(began=began + rng.randrange(40_000)) for _ in graphs]
    for clock in clocks:
        clock.compute = clock.transfer = clock.began
    nanoseconds_per_byte = 0.12 + 0.06 * (number % 4)
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        _step(nodes, clocks, nanoseconds_per_byte, rng)
    return [
        ForwardRecord(
            number=number,
            graph=graph,
            began=clock.began,
            ended=clock.compute + 3_000,
            error=None,
            needed_blocks=BLOCKS * 3 // 8 if number else None,
            submitted=clock.submitted,
            spans=clock.spans,
            waits=clock.waits,
        )
        for graph, clock in zip(graphs, clocks, strict=True)
    ]


def _step(nodes: tuple[Node, ...], clocks: list[_Rank], cost: float, rng: random.Random) -> None:
    """The same node on all ranks; a broadcast ends where the last rank that joined has the bytes."""
    node = nodes[0]
    if node.kind is Kind.BROADCAST:
        starts = []
        for clock in clocks:
            clock.submitted[node.id] = clock.compute
            starts.append(max(clock.compute, clock.transfer) + rng.randrange(5_000, 30_000))
        end = max(starts) + int(node.bytes * cost * rng.uniform(0.95, 1.1))
        for clock, start in zip(clocks, starts, strict=True):
            clock.spans[node.id] = Span(start, end)
            clock.transfer = end
        return
    for own, clock in zip(nodes, clocks, strict=True):
        if own.kind is Kind.COMPUTE:
            _compute(own, clock, rng)
        else:
            now = clock.compute if own.kind is Kind.READY else clock.transfer
            clock.spans[own.id] = Span(now, now)


def _compute(node: Node, clock: _Rank, rng: random.Random) -> None:
    for event in node.after:
        reached = clock.spans[event].end
        if reached > clock.compute:
            clock.waits[event] = Span(clock.compute, reached)
            clock.compute = reached
    typical = 350_000 if node.id.startswith("attend") else 600_000
    end = clock.compute + int(typical * rng.uniform(0.85, 1.2))
    clock.spans[node.id] = Span(clock.compute, end)
    clock.compute = end

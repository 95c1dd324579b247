"""Build the graph of one forward from a stage plan.

Issue order is the order in which an engine meets the nodes: what `begin` starts, the prologue, and
per layer what its hooks issue around `attend[i]` and `compute[i]`.
"""

from kvpp_dag.errors import GraphError
from kvpp_dag.graph.nodes import (
    COMPUTE_STREAM,
    TRANSFER_STREAM,
    Graph,
    Kind,
    Node,
    Policy,
)
from kvpp_dag.plan import StagePlan


def build_forward(
    plan: StagePlan, *, rank: int, num_blocks: int, history: bool, policy: Policy
) -> Graph:
    """The graph of one forward of `rank`.

    Without history, or in a group of one, nothing is broadcast: every layer writes its cache before
    it reads it. `num_blocks` blocks of every bundle are sent. Raises GraphError for a negative block
    count or a rank outside the group.
    """
    if num_blocks < 0:
        raise GraphError(f"A forward over {num_blocks} blocks was asked for; expected 0 or more.")
    build = _Builder(plan, rank, num_blocks, policy)
    nodes = build.with_history() if history and plan.ranks > 1 else build.without_history()
    return Graph(
        nodes=tuple(nodes),
        rank=rank,
        ranks=plan.ranks,
        layout_hash=plan.layout_hash,
        history=history,
        policy=policy,
        depth=plan.depth,
    )


class _Builder:
    def __init__(self, plan: StagePlan, rank: int, num_blocks: int, policy: Policy) -> None:
        self.plan = plan
        self.rank = rank
        self.num_blocks = num_blocks
        self.policy = policy
        self.layers = len(plan.bundles)

    def without_history(self) -> list[Node]:
        nodes = [_compute("prologue")]
        for i in range(self.layers):
            nodes.append(_compute(f"attend[{i}]", layer=i, writes=(self._cache(i),)))
            nodes.append(_compute(f"compute[{i}]", layer=i))
        return nodes

    def with_history(self) -> list[Node]:
        depth = self.plan.depth
        on_release = self.policy is Policy.ON_RELEASE
        started = min(depth + on_release, self.layers)
        nodes = [node for i in range(started) for node in self._transfer(i)]
        nodes.append(_compute("prologue"))
        for i in range(self.layers):
            if not on_release:
                nodes += self._transfer(i + depth)
            cache = (self._cache(i),)
            after = (f"completion[{i}]",)
            nodes.append(_compute(f"attend[{i}]", layer=i, reads=cache, writes=cache, after=after))
            if on_release:
                nodes += self._transfer(i + depth + 1)
            nodes.append(_compute(f"compute[{i}]", layer=i))
        return nodes

    def _transfer(self, i: int) -> list[Node]:
        """Ready event, broadcast and completion event of ordinal `i`; nothing past the last one."""
        if i >= self.layers:
            return []
        owner, slot = self.plan.owners[i], self.plan.slot(i)
        owned = owner == self.rank
        broadcast = Node(
            id=f"broadcast[{i}]",
            kind=Kind.BROADCAST,
            stream=TRANSFER_STREAM,
            after=(f"ready[{i}]", *((f"broadcast[{i - 1}]",) if i else ())),
            reads=(f"persistent[{i}]",) if owned else (),
            writes=() if owned else (f"scratch[{slot}]",),
            layer=i,
            owner=owner,
            slot=slot,
            bytes=self.plan.bundles[i].bytes_per_block * self.num_blocks,
        )
        ready = _event(Kind.READY, COMPUTE_STREAM, i, self._ready_after(i))
        completion = _event(Kind.COMPLETION, TRANSFER_STREAM, i, (broadcast.id,))
        return [ready, broadcast, completion]

    def _ready_after(self, i: int) -> tuple[str, ...]:
        """The last reader of the slot that ordinal `i` takes."""
        before = i - self.plan.slots
        return (f"attend[{before}]",) if before >= 0 else ()

    def _cache(self, i: int) -> str:
        """The buffer in which this rank finds the cache of ordinal `i`."""
        owned = self.plan.owners[i] == self.rank
        return f"persistent[{i}]" if owned else f"scratch[{self.plan.slot(i)}]"


def _event(kind: Kind, stream: str, i: int, after: tuple[str, ...]) -> Node:
    return Node(id=f"{kind}[{i}]", kind=kind, stream=stream, after=after, layer=i)


def _compute(
    node_id: str,
    *,
    layer: int | None = None,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
) -> Node:
    return Node(
        id=node_id,
        kind=Kind.COMPUTE,
        stream=COMPUTE_STREAM,
        layer=layer,
        reads=reads,
        writes=writes,
        after=after,
    )

"""Build the graph of one forward from a stage plan.

Issue order is the order in which an engine meets the nodes: what `begin` starts, the prologue, and
per layer what its hooks issue around `attend[i]` and `compute[i]`.
"""

from kvpp_dag.errors import GraphError
from kvpp_dag.graph.nodes import (
    COMPUTE_STREAM,
    COPY_STREAM,
    ENGINE_GROUP,
    SCRATCH,
    STAGING,
    TRANSFER_STREAM,
    Collectives,
    Graph,
    Kind,
    Node,
    Policy,
)
from kvpp_dag.plan import StagePlan


def build_forward(
    plan: StagePlan,
    *,
    rank: int,
    num_blocks: int,
    history: bool,
    policy: Policy,
    chunks: int = 0,
) -> Graph:
    """The graph of one forward of `rank`.

    Without history, or in a group of one, nothing is broadcast: every layer writes its cache before
    it reads it. Without chunks each bundle is sent in place by one broadcast of `num_blocks` blocks. With
    `chunks` each travels in that many pieces of `num_blocks` blocks at most, which its owner packs into one
    of two staging halves and the others unpack from theirs; several pieces do so on a stream of their own,
    beside the sending. In a group of several ranks every compute node may hold collectives of the engine's,
    and says so. Raises GraphError for a negative number or a rank outside the group.
    """
    build = _Builder(plan, num_blocks, chunks)
    sends = history and plan.ranks > 1
    return Graph(
        nodes=tuple(build.with_history(rank, policy) if sends else build.without_history(rank)),
        rank=rank,
        ranks=plan.ranks,
        layout_hash=plan.layout_hash,
        history=history,
        policy=policy,
        depth=plan.depth,
    )


def build_collectives(
    plan: StagePlan, *, num_blocks: int, policy: Policy, chunks: int = 0
) -> list[Collectives]:
    """What each rank of the group issues in a forward with history, in issue order, without its graph.

    What is done for a layer has two forms, of its owner and of the others, and each is built once for all ranks.
    Raises GraphError for a negative number.
    """
    build = _Builder(plan, num_blocks, chunks)
    steps = build.steps(policy) if plan.ranks > 1 else []
    forms = {owned: [build.issued(step, owned=owned) for step in steps] for owned in (True, False)}
    owners = [plan.owners[i] if i is not None else 0 for _, i in steps]
    return [
        Collectives(
            rank=rank,
            ranks=plan.ranks,
            layout_hash=plan.layout_hash,
            issued=tuple(node for k, owner in enumerate(owners) for node in forms[owner == rank][k]),
        )
        for rank in range(plan.ranks)
    ]


_Step = tuple[str, int | None]
"""What an engine meets next: the `transfer`, `attend` or `compute` of an ordinal, or the `prologue`."""


class _Builder:
    """Makes the nodes of any rank; `owned` is whether that rank owns the layer in question."""

    def __init__(self, plan: StagePlan, num_blocks: int, chunks: int) -> None:
        if num_blocks < 0 or chunks < 0:
            raise GraphError(
                f"A forward over {num_blocks} blocks in {chunks} chunks was asked for; expected 0 or more."
            )
        self.plan = plan
        self.chunks = chunks
        self.layers = len(plan.bundles)
        self.bytes = [bundle.bytes_per_block * num_blocks for bundle in plan.bundles]
        self.slots = [plan.slot(i) for i in range(self.layers)]
        self.scratch = [f"{SCRATCH}{slot}]" for slot in range(plan.slots)]
        self.stream = COPY_STREAM if chunks > 1 else TRANSFER_STREAM
        self.collectives = (ENGINE_GROUP,) if plan.ranks > 1 else ()

    def without_history(self, rank: int) -> list[Node]:
        nodes = [self._compute("prologue", None)]
        for i, owner in enumerate(self.plan.owners):
            nodes.append(self._compute(f"attend[{i}]", i, writes=self._cache(i, owner == rank)))
            nodes.append(self._compute(f"compute[{i}]", i))
        return nodes

    def with_history(self, rank: int, policy: Policy) -> list[Node]:
        owners = self.plan.owners
        nodes: list[Node] = []
        for step in self.steps(policy):
            nodes += self._nodes(step, step[1] is not None and owners[step[1]] == rank)
        return nodes

    def steps(self, policy: Policy) -> list[_Step]:
        """The order in which any rank's host meets what there is to do in a forward with history."""
        on_release = policy is Policy.ON_RELEASE
        ahead = self.plan.depth + on_release
        steps: list[_Step] = [("transfer", i) for i in range(min(ahead, self.layers))]
        steps.append(("prologue", None))
        for i in range(self.layers):
            following: list[_Step] = [("transfer", i + ahead)] if i + ahead < self.layers else []
            attend = ("attend", i)
            steps += (attend, *following) if on_release else (*following, attend)
            steps.append(("compute", i))
        return steps

    def issued(self, step: _Step, *, owned: bool) -> list[Node]:
        """The nodes of a step that issue collectives."""
        return [node for node in self._nodes(step, owned) if node.groups]

    def _nodes(self, step: _Step, owned: bool) -> list[Node]:
        what, i = step
        if i is None:
            return [self._compute(what, None)]
        if what == "transfer":
            return self._transfer(i, owned)
        if what == "compute":
            return [self._compute(f"compute[{i}]", i)]
        cache = self._cache(i, owned)
        after = (f"completion[{i}]",)
        return [self._compute(f"attend[{i}]", i, reads=cache, writes=cache, after=after)]

    def _transfer(self, i: int, owned: bool) -> list[Node]:
        """From the ready event to the completion event of ordinal `i`."""
        before = i - self.plan.slots  # the last reader of the slot that this layer takes
        ready = Node(
            id=f"ready[{i}]",
            kind=Kind.READY,
            stream=COMPUTE_STREAM,
            after=(f"attend[{before}]",) if before >= 0 else (),
            layer=i,
        )
        return [ready, *(self._packed(i, owned) if self.chunks else self._in_place(i, owned, ready.id))]

    def _in_place(self, i: int, owned: bool, ready: str) -> tuple[Node, Node]:
        name, cache = f"broadcast[{i}]", self._cache(i, owned)
        broadcast = Node(
            id=name,
            kind=Kind.BROADCAST,
            stream=TRANSFER_STREAM,
            after=(f"broadcast[{i - 1}]", ready) if i else (ready,),
            reads=cache if owned else (),
            writes=() if owned else cache,
            layer=i,
            owner=self.plan.owners[i],
            slot=self.slots[i],
            bytes=self.bytes[i],
        )
        return broadcast, _completion(f"completion[{i}]", i, TRANSFER_STREAM, (name,))

    def _packed(self, i: int, owned: bool) -> list[Node]:
        """Pack, broadcast and unpack of each chunk; a half is packed again when it has been unpacked."""
        nodes = self._pack(i, 0, owned)
        for c in range(self.chunks):
            nodes += self._send(i, c, owned)
            if c + 1 < self.chunks:
                nodes += self._pack(i, c + 1, owned)
            nodes.append(self._unpack(i, c, owned))
        return [*nodes, _completion(f"completion[{i}]", i, self.stream, (nodes[-1].id,))]

    def _pack(self, i: int, c: int, owned: bool) -> list[Node]:
        """The owner gathers blocks; the others have nothing to do, but a half that is free."""
        pack = Node(
            id=self._name("pack", i, c),
            kind=Kind.COPY,
            stream=self.stream,
            layer=i,
            after=(f"ready[{i}]",) if c == 0 else (),
            reads=self._cache(i, owned) if owned else (),
            writes=self._half(i, c) if owned else (),
        )
        return [pack, *self._passed_on("packed", i, c, pack)]

    def _send(self, i: int, c: int, owned: bool) -> list[Node]:
        half = self._half(i, c)
        broadcast = Node(
            id=self._name("broadcast", i, c),
            kind=Kind.BROADCAST,
            stream=TRANSFER_STREAM,
            after=(*self._sent_before(i, c), self._passed("pack", "packed", i, c)),
            reads=half if owned else (),
            writes=() if owned else half,
            layer=i,
            owner=self.plan.owners[i],
            bytes=self.bytes[i],
        )
        return [broadcast, *self._passed_on("arrived", i, c, broadcast)]

    def _unpack(self, i: int, c: int, owned: bool) -> Node:
        return Node(
            id=self._name("unpack", i, c),
            kind=Kind.COPY,
            stream=self.stream,
            layer=i,
            slot=self.slots[i],
            after=(self._passed("broadcast", "arrived", i, c),),
            reads=() if owned else self._half(i, c),
            writes=() if owned else self._cache(i, owned),
        )

    def _passed_on(self, label: str, i: int, c: int, node: Node) -> list[Node]:
        """The event by which the other stream learns that `node` is over, if copies have their own stream."""
        if self.stream == TRANSFER_STREAM:
            return []
        return [_completion(self._name(label, i, c), i, node.stream, (node.id,))]

    def _passed(self, node: str, event: str, i: int, c: int) -> str:
        """What to come after where the other stream may have to wait: the node itself on one stream."""
        return self._name(node if self.stream == TRANSFER_STREAM else event, i, c)

    def _name(self, label: str, i: int, c: int) -> str:
        return f"{label}[{i}]" if self.chunks == 1 else f"{label}.{c}[{i}]"

    def _half(self, i: int, c: int) -> tuple[str]:
        """The staging half of a chunk: chunks take turns over the whole forward."""
        return (f"{STAGING}{(i * self.chunks + c) % 2}]",)

    def _sent_before(self, i: int, c: int) -> tuple[str, ...]:
        """The broadcast before that of chunk `c` of ordinal `i`."""
        if c:
            return (self._name("broadcast", i, c - 1),)
        return (self._name("broadcast", i - 1, self.chunks - 1),) if i else ()

    def _cache(self, i: int, owned: bool) -> tuple[str]:
        """The buffer that holds the cache of ordinal `i`."""
        return (f"persistent[{i}]",) if owned else (self.scratch[self.slots[i]],)

    def _compute(
        self,
        node_id: str,
        layer: int | None,
        *,
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
            collectives=self.collectives,
        )


def _completion(node_id: str, i: int, stream: str, after: tuple[str, ...]) -> Node:
    return Node(id=node_id, kind=Kind.COMPLETION, stream=stream, after=after, layer=i)

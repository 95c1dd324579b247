"""Prove that a graph is sound before it runs.

The rules are generic: two nodes whose accesses conflict must be ordered by a path, a read must find
what its own layer wrote, every transfer must have a waiter, and the hosts of all ranks must issue the
collectives of all groups in one sequence, in which a device can run them one after another: nothing makes
devices start collectives of different groups in one order but that. A graph built by hand is held to the
same rules as a compiled one.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise

from kvpp_dag.graph.collectives import collective_order
from kvpp_dag.graph.finding import Finding
from kvpp_dag.graph.nodes import (
    SCRATCH,
    STAGING,
    TRANSFERS,
    Graph,
    Kind,
)
from kvpp_dag.graph.order import Cycle, Order, cycle_one_at_a_time, order_of

MAX_FINDINGS = 1000
"""Races, and wrong contents, that are looked for in one rank's graph; there can be millions."""


def verify(graph: Graph, following: Graph | None = None) -> tuple[Finding, ...]:
    """Findings in one rank's forward and across the wrap into the `following` one.

    `following` is the forward after it, by default the same graph again; what concerns a forward by
    itself is judged on `graph` only. No findings means that every execution which respects edges and
    stream order is free of races and deadlocks, and reads what it should. Reads are judged only where
    there is no race.
    """
    return _findings((graph, following if following is not None else graph))


def verify_alone(graph: Graph, order: Order | Cycle | None = None) -> tuple[Finding, ...]:
    """Findings in a forward that is drained before anything else runs on its streams.

    `order` is `order_of` the graph, where the caller has it: finding it is most of the work.
    """
    return _findings((graph,), order)


def verify_group(graphs: Sequence[Graph]) -> tuple[Finding, ...]:
    """Findings over the same forward of several ranks: `verify` of each, and collective order.

    With fewer graphs than the group has ranks, only those given are compared.
    """
    findings = [finding for graph in graphs for finding in verify(graph)]
    return (*findings, *collective_order(graphs))


class _Labelled:
    """Consecutive forwards numbered through, with names that tell the second forward apart."""

    def __init__(self, graphs: tuple[Graph, ...]) -> None:
        self.rank = graphs[0].rank
        self.first_length = len(graphs[0].nodes)
        self.nodes = tuple(node for graph in graphs for node in graph.nodes)
        self.accesses: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            for buffer in dict.fromkeys((*node.reads, *node.writes)):
                self.accesses[buffer].append((i, buffer in node.writes))
        self.pieces = [piece for graph in graphs for piece in _pieces(graph)]

    def forward(self, i: int) -> int:
        return int(i >= self.first_length)

    def name(self, i: int) -> str:
        return self.nodes[i].id + (" of the next forward" if self.forward(i) else "")


def _pieces(graph: Graph) -> Iterator[int | None]:
    """Which piece of its layer each transfer carries, as the runtime counts them: in the order of the graph.

    A copy that names a slot unpacks, and one that names none packs.
    """
    counts: Counter[tuple[int | None, Kind, bool]] = Counter()
    for node in graph.nodes:
        if node.kind in TRANSFERS:
            what = (node.layer, node.kind, node.kind is Kind.COPY and node.slot is None)
            yield counts[what]
            counts[what] += 1
        else:
            yield None


def _findings(graphs: tuple[Graph, ...], single: Order | Cycle | None = None) -> tuple[Finding, ...]:
    """Findings over consecutive forwards; what concerns one forward is judged on the first, in its `single` order."""
    forwards = _Labelled(graphs)
    single = single or order_of(graphs[:1])
    if isinstance(single, Cycle):
        return (_deadlock(forwards, single),)
    order = order_of(graphs) if len(graphs) > 1 else single
    if isinstance(order, Cycle):
        return (_deadlock(forwards, order),)
    races = tuple(islice(_races(forwards, order), MAX_FINDINGS))
    return (
        *races,
        *(() if races else islice(_contents(forwards, order), MAX_FINDINGS)),
        *_unjoined(graphs[0], single),
        *_unordered_collectives(forwards, order),
        *_overtaken_collectives(graphs[0]),
        *_misdescribed(graphs[0]),
    )


def _deadlock(forwards: _Labelled, cycle: Cycle) -> Finding:
    names = tuple(forwards.nodes[i].id for i in cycle.nodes)
    return Finding(
        rule="deadlock",
        rank=forwards.rank,
        nodes=names,
        message=f"deadlock on rank {forwards.rank}: {' -> '.join(names)} wait for each other.",
    )


def _unjoined(graph: Graph, order: Order) -> Iterator[Finding]:
    """Transfers that no other stream waits for within their forward."""
    transfers = [(i, n) for i, n in enumerate(graph.nodes) if n.kind in TRANSFERS]
    awaited = {node.stream: 0 for _, node in transfers}
    for stream in awaited:
        for i, node in enumerate(graph.nodes):
            if node.stream != stream:
                awaited[stream] |= order.ancestors[i]
    for i, node in transfers:
        if not awaited[node.stream] >> i & 1:
            yield Finding(
                rule="unjoined",
                rank=graph.rank,
                nodes=(node.id,),
                message=f"unjoined transfer on rank {graph.rank}: nothing waits for {node.id}, so the "
                "forward can end while it runs; add a completion event and a waiter.",
            )


def _unordered_collectives(forwards: _Labelled, order: Order) -> Iterator[Finding]:
    """Pairs of collectives of one group that this rank could start in another order than they are listed in."""
    positions: dict[str, list[int]] = defaultdict(list)
    for i, node in enumerate(forwards.nodes):
        for group in dict.fromkeys(node.groups):
            positions[group].append(i)
    for i, j in chain.from_iterable(map(pairwise, positions.values())):
        if not forwards.forward(i) and not order.ancestors[j] >> i & 1:
            first, second = forwards.name(i), forwards.name(j)
            yield Finding(
                rule="collectives",
                rank=forwards.rank,
                nodes=(forwards.nodes[i].id, forwards.nodes[j].id),
                message=f"collective order on rank {forwards.rank}: no path leads from {first} to "
                f"{second}, so ranks may start them in different orders and deadlock.",
            )


def _overtaken_collectives(graph: Graph) -> Iterator[Finding]:
    """Collectives that wait for one issued later, which a device may start only when they have ended."""
    cycle = cycle_one_at_a_time(graph)
    if cycle is not None:
        names = tuple(graph.nodes[i].id for i in cycle.nodes)
        yield Finding(
            rule="collectives",
            rank=graph.rank,
            nodes=names,
            message=f"collective order on rank {graph.rank}: {' -> '.join(names)} wait for each other where the "
            "device runs collectives one after another, in the order in which the host issues them.",
        )


def _misdescribed(graph: Graph) -> Iterator[Finding]:
    """Transfers that contradict themselves: by their owner or slot, or as a copy of nothing."""
    for node in graph.nodes:
        problem = None
        if node.kind is Kind.COPY and node.writes and not node.reads:
            problem = f"it copies into {', '.join(node.writes)}, but reads nothing"
        elif node.kind is not Kind.BROADCAST:
            continue
        elif node.owner is not None and node.owner >= graph.ranks:
            problem = f"its owner {node.owner} is not one of the {graph.ranks} ranks"
        elif node.owner == graph.rank and node.writes:
            problem = f"this rank owns it, but it writes {', '.join(node.writes)}"
        elif node.owner not in (None, graph.rank) and (node.reads or not node.writes):
            problem = f"rank {node.owner} owns it, so here it must write a buffer and read none"
        elif node.slot is not None and node.writes not in ((), (f"{SCRATCH}{node.slot}]",)):
            problem = f"it goes into slot {node.slot}, but writes {', '.join(node.writes)}"
        if problem:
            yield Finding(
                rule="content",
                rank=graph.rank,
                nodes=(node.id,),
                message=f"wrong content on rank {graph.rank}: {node.id} contradicts itself: {problem}.",
            )


def _races(forwards: _Labelled, order: Order) -> Iterator[Finding]:
    """Conflicting accesses that no path orders."""
    for buffer, accesses in forwards.accesses.items():
        written = sum(1 << i for i, writes in accesses if writes)
        touched = sum(1 << i for i, _ in accesses)
        for j, writes in accesses:
            earlier = (touched if writes else written) & ((1 << j) - 1)
            unordered = earlier & ~order.ancestors[j]
            while unordered:
                i = unordered.bit_length() - 1
                unordered ^= 1 << i
                if not order.ordered(i, j):
                    yield _race(forwards, buffer, i, j)


def _race(forwards: _Labelled, buffer: str, i: int, j: int) -> Finding:
    first, second = forwards.name(i), forwards.name(j)
    return Finding(
        rule="race",
        rank=forwards.rank,
        nodes=(forwards.nodes[i].id, forwards.nodes[j].id),
        message=f"race on {buffer} of rank {forwards.rank}: no path orders {first} and {second}.",
    )


def _contents(forwards: _Labelled, order: Order) -> Iterator[Finding]:
    """Reads that would find another layer's data, in scratch another forward's, in staging another piece.

    Needs a graph without races: only then is there one last writer before every read. As the writers of a buffer
    are then ordered, those before a read are the first few of them.
    """
    for buffer, accesses in forwards.accesses.items():
        writers = [i for i, writes in accesses if writes]
        writers.sort(key=lambda i: order.ancestors[i].bit_count())
        for j, _ in accesses:
            reader = forwards.nodes[j]
            if buffer not in reader.reads or reader.layer is None:
                continue
            before = bisect_left(writers, True, key=lambda i: not order.ancestors[j] >> i & 1)
            last = writers[before - 1] if before else None
            problem = _content_problem(forwards, buffer, j, last)
            if problem:
                yield Finding(
                    rule="content",
                    rank=forwards.rank,
                    nodes=(reader.id,) if last is None else (forwards.nodes[last].id, reader.id),
                    message=f"wrong content on rank {forwards.rank}: {forwards.name(j)} reads {buffer}"
                    f" of layer {reader.layer}, {problem}.",
                )


def _content_problem(forwards: _Labelled, buffer: str, j: int, last: int | None) -> str | None:
    is_scratch = buffer.startswith((SCRATCH, STAGING))
    if last is None:
        return "which nothing wrote before" if is_scratch else None
    if forwards.nodes[last].layer != forwards.nodes[j].layer:
        return f"but {forwards.name(last)} wrote it last"
    if is_scratch and forwards.forward(last) != forwards.forward(j):
        return f"but the last to write it was {forwards.name(last)} one forward earlier"
    pieces = {forwards.pieces[last], forwards.pieces[j]} - {None}
    if buffer.startswith(STAGING) and len(pieces) > 1:
        return f"but {forwards.name(last)}, which wrote it last, carries another piece of the layer"
    return None

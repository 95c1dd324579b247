"""Decide by trying out every execution whether forwards can go wrong.

Nothing of `kvpp_dag.graph.order` or `kvpp_dag.graph.verify` is used. Streams are queues: the head of a
queue may start once everything in its `after` has ended, and ends at some later moment. Buffers hold a
tag (layer, forward, piece) that says whose content they have; the transfers of a layer carry its pieces in the order
in which they are listed. A broadcast brings the layer that its owner sends,
if the owner is among the ranks given; an owner's own buffers get nothing. One that names another slot than
it writes contradicts itself, and both readings are tried. All reachable states are visited; the first state
that shows a fault ends the search. Where something is about to run that touches no buffer and no peer, nothing
else is tried first: nobody can tell the order.

Collectives of other groups than KVPP's start and end there like any compute, but must not overtake those of
their group that are listed ahead: more order would only hide races. What they can do to a device that runs
collectives one after another, in the order in which the host issued them, is searched apart: there one starts
only when those issued before it have ended, and ends only when every rank has started its own.

Faults: two conflicting accesses at the same time; a read that finds another layer's bytes, or in scratch and
staging those of another forward; a copy of nothing; a transfer still running when every other stream has
finished its forward; a collective that starts before one that is listed ahead of it; a state that nothing
leads out of. With several ranks a collective ends only after every rank has started it, and all ranks must
mean the same.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import networkx as nx

from kvpp_dag.graph import Graph, Kind, Node

Tag = tuple[int | None, int, int | None]
_State = tuple[tuple[int, ...], tuple[Tag | None, ...]]
TRANSFERS = (Kind.BROADCAST, Kind.COPY)
"""Nodes that must not outlast their forward."""
NOTHING: Tag = (None, -1, None)
"""The content of a buffer that waited for bytes which nobody sent."""


@dataclass(eq=False)
class _Task:
    rank: int
    forward: int
    node: Node
    queue: int
    place: int
    owned: bool
    by_slot: bool
    piece: int | None = None
    before: list["_Task"] = field(default_factory=list)
    collective: int | None = None
    joined: list[tuple[str, int]] = field(default_factory=list)
    issued_before: "_Task | None" = None
    ahead: list["_Task"] = field(default_factory=list)
    scattered: bool = False

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return self.node.reads

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Where the bytes go; those of a broadcast perhaps into the slot that it names."""
        return _named_slot(self.node, owned=self.owned) if self.by_slot else self.node.writes

    @cached_property
    def instant(self) -> bool:
        """Whether starting and ending at once hides nothing: it touches no buffer, nor need it be awaited."""
        return not (self.reads or self.writes or self.scattered or self.node.kind in TRANSFERS)


def fault_of(ranks: Sequence[Sequence[Graph]], *, exact: bool = False) -> str | None:
    """The first fault found in any execution of consecutive forwards of one or more ranks, or None.

    `exact` also demands that an owner sends precisely what the forward before wrote.
    """
    fault = _World(ranks, exact).search()
    nodes = [(n, n.owner == graph.rank) for forwards in ranks for graph in forwards for n in graph.nodes]
    if fault is None and any(_named_slot(n, owned=owned) != n.writes for n, owned in nodes):
        fault = _World(ranks, exact, by_slot=True).search()
    if fault is None and any(n.collectives for n, _ in nodes):
        fault = _World(ranks, exact, one_at_a_time=True).search()
    return fault


def _named_slot(node: Node, *, owned: bool) -> tuple[str, ...]:
    """The slot that a broadcast names, if it is one by which bytes come in; else what a node writes."""
    named = node.kind is Kind.BROADCAST and node.slot is not None and node.writes and not owned
    return (f"scratch[{node.slot}]",) if named else node.writes


class _World:
    instants_first = True

    def __init__(
        self,
        ranks: Sequence[Sequence[Graph]],
        exact: bool,
        by_slot: bool = False,
        one_at_a_time: bool = False,
    ) -> None:
        self.exact = exact
        self.by_slot = by_slot
        self.one_at_a_time = one_at_a_time
        self.queues: list[list[_Task]] = []
        self.tasks: list[_Task] = []
        self.collectives: list[list[_Task]] = []
        self.joined: list[dict[tuple[str, int], _Task]] = []
        self.joins: list[tuple[_Task, list[_Task]]] = []
        for rank, forwards in enumerate(ranks):
            self._add_rank(rank, forwards)
        names = [(t.rank, b) for t in self.tasks for b in (*t.reads, *t.writes)]
        self.buffers = {name: i for i, name in enumerate(dict.fromkeys(names))}

    def _add_rank(self, rank: int, forwards: Sequence[Graph]) -> None:
        queue_of: dict[str, int] = {}
        started: list[_Task] = []
        counts: Counter[str] = Counter()
        joined: dict[tuple[str, int], _Task] = {}
        latest: _Task | None = None
        of_group: dict[str, list[_Task]] = {}
        for number, graph in enumerate(forwards):
            by_id: dict[str, _Task] = {}
            for node in graph.nodes:
                if node.stream not in queue_of:
                    queue_of[node.stream] = len(self.queues)
                    self.queues.append([])
                queue = queue_of[node.stream]
                owned = node.owner == graph.rank
                task = _Task(rank, number, node, queue, len(self.queues[queue]), owned, self.by_slot)
                if node.kind is Kind.BROADCAST:
                    task.collective = len(started)
                    started.append(task)
                for group in node.collectives:
                    task.ahead += of_group.setdefault(group, [])[-1:]
                    of_group[group].append(task)
                if self.one_at_a_time and (node.kind is Kind.BROADCAST or node.collectives):
                    task.issued_before, latest = latest, task
                    for group in node.collectives or ("",):
                        task.joined.append((group, counts[group]))
                        joined[group, counts[group]] = task
                        counts[group] += 1
                self.queues[queue].append(task)
                by_id[node.id] = task
            for (what, _), transfers in groupby(sorted(by_id.values(), key=_role), key=_role):
                if what in ("send", "pack", "unpack"):
                    for piece, task in enumerate(transfers):
                        task.piece = piece
            for task in by_id.values():
                task.before = [by_id[name] for name in task.node.after]
            self.tasks += by_id.values()
            if number == 0:
                for task in by_id.values():
                    if task.node.kind in TRANSFERS:
                        others = [t for t in by_id.values() if t.queue != task.queue]
                        self.joins.append((task, others))
        for tasks in of_group.values():
            for task in tasks:
                task.scattered = len({t.queue for t in tasks}) > 1
        self.collectives.append(started)
        self.joined.append(joined)

    def search(self) -> str | None:
        start = ((0,) * len(self.queues), (None,) * len(self.buffers))
        seen = {start}
        todo = [start]
        while todo:
            progress, tags = todo.pop()
            moves = self._unjoined(progress) or self._moves(progress, tags)
            if isinstance(moves, str):
                return moves
            if not moves and any(s < 2 * len(q) for s, q in zip(progress, self.queues, strict=True)):
                return "deadlock"
            for state in moves:
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
        return None

    def _moves(self, progress: tuple[int, ...], tags: tuple[Tag | None, ...]) -> list[_State] | str:
        """The states right after this one, or the fault of something that may start here."""
        moves: list[_State] = []
        for queue, steps in enumerate(progress):
            if steps == 2 * len(self.queues[queue]):
                continue
            task = self.queues[queue][steps // 2]
            after, count = tags, 1
            if steps % 2:
                if not self._peers_started(task, progress):
                    continue
                after = self._written(task, tags)
            elif task.issued_before is not None and not self._ended(task.issued_before, progress):
                continue
            elif all(self._ended(t, progress) for t in task.before):
                fault = self._fault_at_start(task, progress, tags)
                if fault:
                    return fault
                count = 2 if task.instant and not task.joined else 1
            else:
                continue
            moves.append(((*progress[:queue], steps + count, *progress[queue + 1 :]), after))
            if count == 2 and self.instants_first:
                return moves[-1:]
        return moves

    @staticmethod
    def _started(task: _Task, progress: tuple[int, ...]) -> bool:
        return progress[task.queue] > 2 * task.place

    @staticmethod
    def _ended(task: _Task, progress: tuple[int, ...]) -> bool:
        return progress[task.queue] >= 2 * task.place + 2

    def _peers(self, task: _Task) -> list[_Task | None]:
        if task.joined:
            return [joined.get(place) for place in task.joined for joined in self.joined]
        number = task.collective
        if number is None:
            return []
        return [c[number] if number < len(c) else None for c in self.collectives]

    def _peers_started(self, task: _Task, progress: tuple[int, ...]) -> bool:
        return all(p is not None and self._started(p, progress) for p in self._peers(task))

    def _unjoined(self, progress: tuple[int, ...]) -> str | None:
        for task, others in self.joins:
            if not self._ended(task, progress) and all(self._ended(t, progress) for t in others):
                return f"unjoined: {task.node.id}"
        return None

    def _fault_at_start(
        self, task: _Task, progress: tuple[int, ...], tags: tuple[Tag | None, ...]
    ) -> str | None:
        for queue, steps in enumerate(progress):
            if steps % 2:
                other = self.queues[queue][steps // 2]
                if other.rank == task.rank and _conflict(other, task):
                    return f"race: {other.node.id} and {task.node.id}"
        if task.node.kind is Kind.COPY and task.writes and not task.reads:
            return f"content: {task.node.id} copies from nowhere"
        for buffer in task.reads:
            fault = self._wrong_content(task, buffer, tags[self.buffers[task.rank, buffer]])
            if fault:
                return fault
        listed_before = self.collectives[task.rank][: task.collective or 0]
        if not all(self._started(t, progress) for t in (*listed_before, *task.ahead)):
            return f"collectives: {task.node.id} overtakes another"
        for peer in self._peers(task):
            if peer is not None and _meaning(peer.node) != _meaning(task.node):
                return f"collectives: {peer.node.id} meets {task.node.id}"
        return None

    def _wrong_content(self, task: _Task, buffer: str, tag: Tag | None) -> str | None:
        layer, now = task.node.layer, task.forward
        if layer is None:
            return None
        if buffer.startswith(("scratch[", "staging[")):
            right = tag is not None and tag[:2] == (layer, now)
            if buffer.startswith("staging["):
                right = right and (tag[2] == task.piece or None in (tag[2], task.piece))
        elif self.exact and task.node.kind is Kind.BROADCAST:
            right = (tag and tag[:2]) == ((layer, now - 1) if now else None)
        else:
            right = tag is None or tag[0] == layer
        return None if right else f"content: {task.node.id} finds {tag} in {buffer}"

    def _written(self, task: _Task, tags: tuple[Tag | None, ...]) -> tuple[Tag | None, ...]:
        if not task.writes:
            return tags
        content = self._content(task)
        new = list(tags)
        for buffer in task.writes:
            new[self.buffers[task.rank, buffer]] = content
        return tuple(new)

    def _content(self, task: _Task) -> Tag:
        """What a task writes. A broadcast brings what its owner sends, if that rank is given."""
        if task.collective is None:
            return task.node.layer, task.forward, task.piece
        owner = next((p for p in self._peers(task) if p is not None and p.owned), None)
        if task.owned or (owner is not None and not owner.reads):
            return NOTHING
        return (owner or task).node.layer, task.forward, (owner or task).piece


def _role(task: _Task) -> tuple[str, str]:
    """What a task does for its layer."""
    kind, layer = task.node.kind, str(task.node.layer)
    if kind is Kind.COPY:
        return "pack" if task.node.slot is None else "unpack", layer
    return "send" if kind is Kind.BROADCAST else "else", layer


def _conflict(a: _Task | Node, b: _Task | Node) -> bool:
    touched_a, touched_b = {*a.reads, *a.writes}, {*b.reads, *b.writes}
    return bool(touched_a & set(b.writes) or touched_b & set(a.writes))


def _meaning(node: Node) -> tuple[str, int | None, int]:
    return node.id, node.owner, node.bytes


def fault_by_closure(graph: Graph) -> str | None:
    """The same question for graphs too large to try out: races and unjoined transfers, by networkx.

    Covers what taking edges away from a sound graph can break.
    """
    dag = nx.DiGraph()
    last: dict[str, tuple[int, str]] = {}
    nodes = [((n, node.id), node) for n in (0, 1) for node in graph.nodes]
    for key, node in nodes:
        dag.add_node(key)
        dag.add_edges_from(((key[0], name), key) for name in node.after)
        if node.stream in last:
            dag.add_edge(last[node.stream], key)
        last[node.stream] = key
    if not nx.is_directed_acyclic_graph(dag):
        return "deadlock"
    later = {key: nx.descendants(dag, key) for key, _ in nodes}
    for i, (key, node) in enumerate(nodes):
        for other_key, other in nodes[:i]:
            ordered = key in later[other_key] or other_key in later[key]
            if _conflict(node, other) and not ordered:
                return f"race: {other_key} and {key}"
    for node in graph.broadcasts:
        waiters = {n.id for n in graph.nodes if n.stream != node.stream}
        if not any((0, name) in later[0, node.id] for name in waiters):
            return f"unjoined: {node.id}"
    return None

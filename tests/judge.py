"""Decide by trying out every execution whether forwards can go wrong.

Nothing of `kvpp_dag.graph.order` or `kvpp_dag.graph.verify` is used. Streams are queues: the head of a
queue may start once everything in its `after` has ended, and ends at some later moment. Buffers hold a
tag (layer, forward) that says who wrote them last. All reachable states are visited; the first state
that shows a fault ends the search.

Faults: two conflicting accesses at the same time; a read that finds another layer's bytes, or in scratch
those of another forward; a transfer still running when every other stream has finished its forward; a
collective that starts before one that is listed ahead of it; a state that nothing leads out of. With
several ranks a collective ends only after every rank has started it, and all ranks must mean the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import networkx as nx

from kvpp_dag.graph import Graph, Kind, Node

Tag = tuple[int | None, int]


@dataclass(eq=False)
class _Task:
    rank: int
    forward: int
    node: Node
    queue: int
    place: int
    before: list["_Task"] = field(default_factory=list)
    collective: int | None = None

    @property
    def instant(self) -> bool:
        """Whether starting and ending at once hides nothing: it touches no buffer and no peer."""
        return not (self.node.reads or self.node.writes or self.collective is not None)


def fault_of(ranks: Sequence[Sequence[Graph]], *, exact: bool = False) -> str | None:
    """The first fault found in any execution of consecutive forwards of one or more ranks, or None.

    `exact` also demands that an owner sends precisely what the forward before wrote.
    """
    return _World(ranks, exact).search()


class _World:
    def __init__(self, ranks: Sequence[Sequence[Graph]], exact: bool) -> None:
        self.exact = exact
        self.queues: list[list[_Task]] = []
        self.tasks: list[_Task] = []
        self.collectives: list[list[_Task]] = []
        self.joins: list[tuple[_Task, list[_Task]]] = []
        for rank, forwards in enumerate(ranks):
            self._add_rank(rank, forwards)
        names = [(t.rank, b) for t in self.tasks for b in (*t.node.reads, *t.node.writes)]
        self.buffers = {name: i for i, name in enumerate(dict.fromkeys(names))}

    def _add_rank(self, rank: int, forwards: Sequence[Graph]) -> None:
        queue_of: dict[str, int] = {}
        started: list[_Task] = []
        for number, graph in enumerate(forwards):
            by_id: dict[str, _Task] = {}
            for node in graph.nodes:
                if node.stream not in queue_of:
                    queue_of[node.stream] = len(self.queues)
                    self.queues.append([])
                queue = queue_of[node.stream]
                task = _Task(rank, number, node, queue, len(self.queues[queue]))
                if node.kind is Kind.BROADCAST:
                    task.collective = len(started)
                    started.append(task)
                self.queues[queue].append(task)
                by_id[node.id] = task
            for task in by_id.values():
                task.before = [by_id[name] for name in task.node.after]
            self.tasks += by_id.values()
            if number == 0:
                for task in by_id.values():
                    if task.collective is not None:
                        others = [t for t in by_id.values() if t.queue != task.queue]
                        self.joins.append((task, others))
        self.collectives.append(started)

    def search(self) -> str | None:
        start = ((0,) * len(self.queues), (None,) * len(self.buffers))
        seen = {start}
        todo = [start]
        while todo:
            progress, tags = todo.pop()
            fault = self._unjoined(progress)
            if fault:
                return fault
            stuck = True
            for queue, steps in enumerate(progress):
                if steps == 2 * len(self.queues[queue]):
                    continue
                task = self.queues[queue][steps // 2]
                if steps % 2:
                    if not self._peers_started(task, progress):
                        continue
                    after, count = self._written(task, tags), 1
                elif all(self._ended(t, progress) for t in task.before):
                    fault = self._fault_at_start(task, progress, tags)
                    if fault:
                        return fault
                    after, count = tags, 2 if task.instant else 1
                else:
                    continue
                stuck = False
                state = ((*progress[:queue], steps + count, *progress[queue + 1 :]), after)
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
            if stuck and any(s < 2 * len(q) for s, q in zip(progress, self.queues, strict=True)):
                return "deadlock"
        return None

    @staticmethod
    def _started(task: _Task, progress: tuple[int, ...]) -> bool:
        return progress[task.queue] > 2 * task.place

    @staticmethod
    def _ended(task: _Task, progress: tuple[int, ...]) -> bool:
        return progress[task.queue] >= 2 * task.place + 2

    def _peers(self, task: _Task) -> list[_Task | None]:
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
                if other.rank == task.rank and _conflict(other.node, task.node):
                    return f"race: {other.node.id} and {task.node.id}"
        for buffer in task.node.reads:
            fault = self._wrong_content(task, buffer, tags[self.buffers[task.rank, buffer]])
            if fault:
                return fault
        if task.collective is not None:
            listed_before = self.collectives[task.rank][: task.collective]
            if not all(self._started(t, progress) for t in listed_before):
                return f"collectives: {task.node.id} overtakes another"
            for peer in self._peers(task):
                if peer is not None and _meaning(peer.node) != _meaning(task.node):
                    return f"collectives: {peer.node.id} meets {task.node.id}"
        return None

    def _wrong_content(self, task: _Task, buffer: str, tag: Tag | None) -> str | None:
        layer, now = task.node.layer, task.forward
        if layer is None:
            return None
        if buffer.startswith("scratch["):
            right = tag == (layer, now)
        elif self.exact and task.node.kind is Kind.BROADCAST:
            right = tag == ((layer, now - 1) if now else None)
        else:
            right = tag is None or tag[0] == layer
        return None if right else f"content: {task.node.id} finds {tag} in {buffer}"

    def _written(self, task: _Task, tags: tuple[Tag | None, ...]) -> tuple[Tag | None, ...]:
        if not task.node.writes:
            return tags
        new = list(tags)
        for buffer in task.node.writes:
            new[self.buffers[task.rank, buffer]] = (task.node.layer, task.forward)
        return tuple(new)


def _conflict(a: Node, b: Node) -> bool:
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

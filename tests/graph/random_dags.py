"""Random graphs that are safe: jobs of a layer over several streams, with edges where accesses conflict.

Whether a graph is safe is for the brute-force judge to say; what it finds a fault in is thrown away.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

from kvpp_dag.graph import Graph, Kind, Node
from tests.judge import fault_of

BUFFERS = ("scratch[0]", "scratch[1]", "staging[0]", "persistent[0]", "persistent[1]")


def safe_graphs(rng: random.Random, count: int) -> Iterator[Graph]:
    while count:
        graph = random_graph(rng)
        if graph.broadcasts and fault_of([[graph, graph]]) is None:
            count -= 1
            yield graph


def random_graph(rng: random.Random) -> Graph:
    nodes = [node for layer in range(rng.randint(1, 3)) for node in _job(rng, layer)]
    if rng.random() < 0.5:  # keep the jobs' own order, but mix them
        nodes = _merged(rng, nodes)
    if rng.random() < 0.8:  # where forwards meet, all streams meet
        streams = dict.fromkeys(n["stream"] for n in nodes)
        first = [_fields("start", "main"), *(_fields(f"open_{s}", s, after=["start"]) for s in streams)]
        last = _fields("end", "main", after=[n["id"] for n in nodes if n["stream"] != "main"])
        nodes = [*first, *nodes, last]
    _order_conflicts(rng, nodes)
    return Graph(nodes=tuple(Node(**n | {"after": tuple(n["after"])}) for n in nodes))


def _fields(name: str, stream: str, **others: object) -> dict:
    kind = {"kind": Kind.COMPUTE, "after": [], "reads": (), "writes": ()}
    return {"id": name, "stream": stream} | kind | others


def _job(rng: random.Random, layer: int) -> list[dict]:
    """A transfer of a layer, packed before or not, and who reads what it brought."""
    side = rng.choice(["transfer", "transfer", "other"])
    if rng.random() < 0.15:  # touches nothing of this graph, and must be awaited all the same
        return [_fields(f"broadcast[{layer}]", side, layer=layer, kind=Kind.BROADCAST)]
    source, target = rng.choice(BUFFERS), rng.choice(BUFFERS)
    nodes, sent = [], (source,) if source.startswith("persistent") and rng.random() < 0.7 else ()
    if rng.random() < 0.3:
        pack = _fields(f"pack[{layer}]", side, layer=layer, reads=sent, writes=("staging[0]",))
        nodes.append(pack)
        sent = ("staging[0]",)
    bring = _fields(f"broadcast[{layer}]", side, layer=layer, kind=Kind.BROADCAST, reads=sent)
    nodes.append(bring | {"writes": tuple({target} - {*sent})})
    for i in range(rng.randint(1, 2)):
        written = (target,) if rng.random() < 0.4 else ()
        reader = _fields(f"use_{i}[{layer}]", rng.choice(["main", "main", "other"]), layer=layer)
        nodes.append(reader | {"reads": (target,), "writes": written})
    return nodes


def _merged(rng: random.Random, nodes: list[dict]) -> list[dict]:
    """The nodes of all jobs, mixed, with each job's own in their order."""
    jobs = [[n for n in nodes if n["layer"] == layer] for layer in {n["layer"] for n in nodes}]
    result = []
    while any(jobs):
        job = rng.choice([job for job in jobs if job])
        result.append(job.pop(0))
    return result


def _order_conflicts(rng: random.Random, nodes: list[dict]) -> None:
    for j, later in enumerate(nodes):
        for earlier in nodes[:j]:
            touched = {*earlier["reads"], *earlier["writes"]}
            conflict = touched & {*later["writes"]} or {*earlier["writes"]} & {*later["reads"]}
            if later["stream"] != earlier["stream"] and (conflict or rng.random() < 0.05):
                later["after"].append(earlier["id"])
    for earlier, later in pairwise([n for n in nodes if n["kind"] is Kind.BROADCAST]):
        if later["stream"] != earlier["stream"]:
            later["after"].append(earlier["id"])

"""What let a transfer start: the last of what it had to wait for."""

from collections.abc import Sequence

from kvpp_dag.graph import COMPUTE_STREAM, Kind, Node
from kvpp_dag.trace.records import ForwardRecord


def transfers_of(record: ForwardRecord) -> list[list[int | None]]:
    """Every node off the compute stream but events: its position, when it was submitted, and its gate."""
    graph = record.graph
    found: list[list[int | None]] = []
    last: dict[str, Node] = {}
    for node in graph.nodes:
        if node.stream != COMPUTE_STREAM and node.kind is not Kind.COMPLETION:
            submitted = record.submitted.get(node.id)
            before = [graph[name] for name in node.after]
            before += [last[node.stream]] if node.stream in last else []
            found.append(
                [
                    graph.position[node.id],
                    None if submitted is None else submitted - record.began,
                    _gate(record, before, submitted),
                ]
            )
        last[node.stream] = node
    return found


def _gate(record: ForwardRecord, before: Sequence[Node], submitted: int | None) -> int | None:
    """What came last before a transfer: the node, or -1 for the host that submitted it."""
    gate, latest = (None, None) if submitted is None else (-1, submitted)
    for node in before:
        span = record.spans.get(node.id)
        if span is not None and (latest is None or span.end > latest):
            gate, latest = record.graph.position[node.id], span.end
    return gate

"""The graph of a forward as SVG: a lane per stream, explicit edges as arrows, the critical path marked.

A node stands right of everything it comes after, so that time flows from left to right; the order within a
stream is the order along its lane and is not drawn as arrows. Every style is inside the picture, so that it
can be opened by itself, in light and dark.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

from kvpp_dag.graph import Graph, Kind, Node
from kvpp_dag.graph.dot import critical_nodes
from kvpp_dag.graph.nodes import EVENTS

_CHARACTER = 7.3  # width of a character of 12 px monospace text
_PAD = 20  # of a box: room for the mark of the critical path on the left, and some air
_GAP = 18  # between a node and what comes after it
_HEIGHT = 30
_LANE = 112  # from lane to lane
_TOP = 78  # of the first lane; room for its edges
_LEFT = 24

_STYLE = """
.kvpp-graph{--g-ink:#1b2430;--g-line:#66717e;--g-box:#fff;--g-event:#eef1f4;--g-send:#ffe9d2;--g-mark:#b3261e;
background:#fff;font:12px ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace}
@media screen and (prefers-color-scheme:dark){.kvpp-graph{--g-ink:#e6eaf0;--g-line:#93a0af;--g-box:#1a212b;
--g-event:#2a333f;--g-send:#4a3420;--g-mark:#ff8a80;background:#11161d}}
.kvpp-graph text{fill:var(--g-ink)}
.kvpp-graph .lane{stroke:var(--g-line);stroke-dasharray:2 4}
.kvpp-graph rect{stroke:var(--g-line);fill:var(--g-box)}
.kvpp-graph .event rect{fill:var(--g-event)}
.kvpp-graph .broadcast rect{fill:var(--g-send);stroke-dasharray:6 2}
.kvpp-graph .edge{fill:none;stroke:var(--g-line);marker-end:url(#kvpp-arrow)}
.kvpp-graph #kvpp-arrow path{fill:var(--g-line)}
.kvpp-graph .mark{fill:var(--g-mark);display:none}
.kvpp-graph .critical .mark{display:inline}
.kvpp-graph .critical rect{stroke:var(--g-mark);stroke-width:3}
.kvpp-graph .critical text{font-weight:bold}
.kvpp-graph .edge.critical{stroke:var(--g-mark);stroke-width:3}
"""


@dataclass(frozen=True, kw_only=True)
class _Box:
    """Where a node stands, in pixels."""

    x: float
    y: float
    width: float
    lane: int


def to_svg(graph: Graph, critical_path: Iterable[str] = ()) -> str:
    """Draw `graph`; nodes of `critical_path` get a thick border and a triangle, their edges are thick.

    Raises GraphError if the critical path names a node that the graph does not have.
    """
    critical = critical_nodes(graph, critical_path)
    boxes = _layout(graph)
    lanes = list(dict.fromkeys(node.stream for node in graph.nodes))
    width = _LEFT + max((box.x + box.width for box in boxes.values()), default=300.0)
    height = _TOP + _LANE * max(len(lanes), 1)
    about = (
        f"Rank {graph.rank} of {graph.ranks}: {len(graph.nodes)} nodes in {len(lanes)} streams. One lane a "
        "stream, nodes in issue order; arrows are explicit edges. A thick border and a triangle mark the "
        "critical path."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="kvpp-graph" width="{width:.0f}" '
            f'height="{height}" viewBox="0 0 {width:.0f} {height}" role="img" '
            'aria-labelledby="kvpp-graph-title kvpp-graph-desc">',
            f'<title id="kvpp-graph-title">Graph of a forward of rank {graph.rank}</title>',
            f'<desc id="kvpp-graph-desc">{about}</desc>',
            f"<style>{_STYLE}</style>",
            '<defs><marker id="kvpp-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z"/>'
            "</marker></defs>",
            *(_lane(number, name, width) for number, name in enumerate(lanes)),
            *_edges(graph, boxes, critical),
            *(_node(node, boxes[node.id], critical=node.id in critical) for node in graph.nodes),
            "</svg>\n",
        ]
    )


def _layout(graph: Graph) -> dict[str, _Box]:
    """Every node right of the nodes that are listed before it and that it comes after or follows."""
    boxes: dict[str, _Box] = {}
    lanes: dict[str, int] = {}
    last: dict[str, str] = {}
    for node in graph.nodes:
        lane = lanes.setdefault(node.stream, len(lanes))
        before = [boxes[name] for name in (*node.after, last.get(node.stream, "")) if name in boxes]
        boxes[node.id] = _Box(
            x=max((box.x + box.width + _GAP for box in before), default=float(_LEFT)),
            y=_TOP + _LANE * lane,
            width=_PAD + _CHARACTER * len(node.id),
            lane=lane,
        )
        last[node.stream] = node.id
    return boxes


def _lane(number: int, name: str, width: float) -> str:
    y = _TOP + _LANE * number
    middle = y + _HEIGHT / 2
    label = y - 32 if number == 0 else y + _HEIGHT + 44
    return (
        f'<path class="lane" d="M{_LEFT} {middle:g}H{width - _LEFT:.0f}"/>'
        f'<text x="{_LEFT}" y="{label}">{escape(name)} stream</text>'
    )


def _edges(graph: Graph, boxes: dict[str, _Box], critical: frozenset[str]) -> Iterator[str]:
    for node in graph.nodes:
        for before in node.after:
            marked = " critical" if before in critical and node.id in critical else ""
            yield (
                f'<path class="edge{marked}" data-from="{escape(before)}" data-to="{escape(node.id)}" '
                f'd="{_curve(boxes[before], boxes[node.id])}"/>'
            )


def _curve(a: _Box, b: _Box) -> str:
    """Between lanes from edge to edge; within a lane around the nodes between, on its free side."""
    x1, x2 = a.x + a.width - 10, b.x + 10
    if a.lane == b.lane:
        up = a.lane == 0
        y = a.y if up else a.y + _HEIGHT
        bend = y + (-1 if up else 1) * min(34.0, 14 + abs(x2 - x1) / 20)
        return f"M{x1:.0f} {y:.0f}C{x1:.0f} {bend:.0f} {x2:.0f} {bend:.0f} {x2:.0f} {y:.0f}"
    down = a.lane < b.lane
    y1, y2 = (a.y + _HEIGHT, b.y) if down else (a.y, b.y + _HEIGHT)
    middle = (y1 + y2) / 2
    return f"M{x1:.0f} {y1:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"


def _node(node: Node, box: _Box, *, critical: bool) -> str:
    event = node.kind in EVENTS
    style = "event" if event else "broadcast" if node.kind is Kind.BROADCAST else "compute"
    marked = " critical" if critical else ""
    x, y = round(box.x), round(box.y)
    middle = y + _HEIGHT // 2
    return (
        f'<g class="{style}{marked}" data-node="{escape(node.id)}"><title>{escape(_about(node))}</title>'
        f'<rect x="{x}" y="{y}" width="{box.width:.0f}" height="{_HEIGHT}" rx="{15 if event else 3}"/>'
        f'<path class="mark" d="M{x + 5} {middle - 5}l8 5l-8 5z"/>'
        f'<text x="{x + 15}" y="{middle + 4}">{escape(node.id)}</text></g>'
    )


def _about(node: Node) -> str:
    parts = [node.id]
    if node.owner is not None:
        parts.append(f"owner {node.owner}")
    if node.slot is not None:
        parts.append(f"slot {node.slot}")
    if node.bytes:
        parts.append(f"{node.bytes:,} bytes")
    parts += [f"reads {name}" for name in node.reads] + [f"writes {name}" for name in node.writes]
    return ", ".join(parts)

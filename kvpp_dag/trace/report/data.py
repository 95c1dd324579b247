"""What a report page knows, as plain data that goes into it as JSON.

    notes       sentences about what is left out
    causes      name and advice of every cause
    recordings  rank, stage, clock, number of the plan (null: none) and layer names
    plans       what each rank stores, and the layers
    shapes      the distinct graphs without their bytes: nodes as [id, kind, stream, layer, owner, slot]
    bytes       distinct lists of the nodes' bytes
    texts       distinct sentences
    forwards    number, and per recording that holds it what happened: see `_run`

Times are integer nanoseconds after the rank's own begin; `offset` is that begin after the first begin of a rank
of the same stage and clock. What many forwards share is stored once and numbered.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from kvpp_dag.errors import DumpError
from kvpp_dag.graph import Graph, Node
from kvpp_dag.plan import StagePlan
from kvpp_dag.plan.budget import (
    draft_bytes_per_block,
    owned_bytes_per_block,
    physical_bytes_per_block,
    scratch_bytes_per_block,
)
from kvpp_dag.trace.explanation import untold
from kvpp_dag.trace.overlap import ADVICE, Cause, ForwardOverlap, LayerOverlap
from kvpp_dag.trace.records import ForwardRecord, Recording
from kvpp_dag.trace.report.gates import transfers_of

MAX_SPANS = 250_000
"""How many nodes and waits of forwards a page holds; 64 forwards of 61 layers on 8 ranks are about 190,000."""

MAX_DRAWN = 50_000
"""How many nodes and edges of graphs a page draws; about 80 graphs of 61 layers."""

MAX_RANKS = 1024
"""How many ranks of a plan a page lists."""

_CAUSES = list(Cause)
Run = tuple[Recording, ForwardRecord, ForwardOverlap]


class _Table:
    """Distinct values, numbered in the order in which they came."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def values(self) -> list[Any]:
        return list(self.numbers)


class _Tables:
    def __init__(self) -> None:
        self.plans, self.names, self.shapes, self.bytes, self.texts, self.clocks = (
            _Table() for _ in range(6)
        )


def page_data(
    recordings: Sequence[Recording], analyses: Sequence[Sequence[ForwardOverlap]]
) -> tuple[dict[str, Any], list[Graph]]:
    """The data of a page, and the graphs to draw: those of the first shapes.

    `analyses` is what `analyze` says of `recordings`. Forwards beyond `MAX_SPANS` are left out, oldest
    first, and a note says so. Raises DumpError if a single forward exceeds it.
    """
    tables = _Tables()
    grouped = _by_number(recordings, analyses)
    kept, notes = _newest(grouped)
    notes += untold(recordings)
    described = [_recording(recording, tables) for recording in recordings]
    forwards = [_forward(number, grouped[number], recordings, tables) for number in kept]
    shapes: list[Graph] = tables.shapes.values()
    drawn = _drawable(shapes)
    if len(drawn) < len(shapes):
        notes.append(
            f"Of {len(shapes)} different graphs {len(drawn)} are drawn, since a page draws up to "
            f"{MAX_DRAWN:,} nodes and edges; report on fewer recordings to see the others."
        )
    plans: list[StagePlan] = tables.plans.values()
    notes += [
        f"The page lists {MAX_RANKS} of a plan's {plan.ranks} ranks."
        for plan in plans
        if plan.ranks > MAX_RANKS
    ]
    return {
        "notes": notes,
        "causes": [[str(cause), ADVICE[cause]] for cause in _CAUSES],
        "recordings": described,
        "plans": [_plan(plan) for plan in plans],
        "names": tables.names.values(),
        "shapes": [[_node(node) for node in shape.nodes] for shape in shapes],
        "bytes": tables.bytes.values(),
        "texts": tables.texts.values(),
        "forwards": forwards,
    }, drawn


def _by_number(
    recordings: Sequence[Recording], analyses: Sequence[Sequence[ForwardOverlap]]
) -> dict[int, list[Run]]:
    grouped: dict[int, list[Run]] = {}
    for recording, overlaps in zip(recordings, analyses, strict=True):
        for record, overlap in zip(recording.forwards, overlaps, strict=True):
            runs = grouped.setdefault(record.number, [])
            if runs and runs[-1][0] is recording:
                raise DumpError(
                    f"The recording of rank {recording.rank} holds forward {record.number} twice; expected "
                    "every number once."
                )
            runs.append((recording, record, overlap))
    return grouped


def _newest(grouped: dict[int, list[Run]]) -> tuple[list[int], list[str]]:
    """Numbers of the forwards that fit, in order, and what to say about the rest."""
    kept: list[int] = []
    spans = 0
    for number in sorted(grouped, reverse=True):
        size = sum(len(record.graph.nodes) + len(record.waits) for _, record, _ in grouped[number])
        if size > MAX_SPANS:
            raise DumpError(
                f"Forward {number} holds {size:,} nodes and waits, and a page shows up to {MAX_SPANS:,}; "
                "use kvpp-dag explain, or report on fewer ranks."
            )
        spans += size
        if spans > MAX_SPANS:
            break
        kept.append(number)
    left_out = len(grouped) - len(kept)
    if not left_out:
        return kept[::-1], []
    return kept[::-1], [
        f"The page shows the last {len(kept)} of {len(grouped)} forwards, since it holds up to "
        f"{MAX_SPANS:,} nodes and waits; report on fewer recordings to see the other {left_out}."
    ]


def _drawable(shapes: Sequence[Graph]) -> list[Graph]:
    size = 0
    for count, shape in enumerate(shapes):
        size += sum(1 + len(node.after) for node in shape.nodes)
        if size > MAX_DRAWN:
            return list(shapes[:count])
    return list(shapes)


def _recording(recording: Recording, tables: _Tables) -> dict[str, Any]:
    layers = max(
        (n.layer + 1 for f in recording.forwards for n in f.graph.nodes if n.layer is not None),
        default=0,
    )
    names = tuple(recording.layer_name(i) for i in range(layers))
    plan = recording.plan
    return {
        "rank": recording.rank,
        "ranks": recording.ranks,
        "stage": recording.stage,
        "clock": tables.clocks.number((recording.clock, recording.stage)),
        "blocks": recording.num_blocks,
        "names": tables.names.number(names),
        "plan": None if plan is None else tables.plans.number(plan),
    }


def _plan(plan: StagePlan) -> dict[str, Any]:
    """Bytes are per block, as in `kvpp_dag.plan.budget`."""
    return {
        "slots": plan.slots,
        "ranks": [
            {
                "layers": [bundle.ordinal for bundle in plan.owned(rank)],
                "owned": owned_bytes_per_block(plan, rank),
                "scratch": scratch_bytes_per_block(plan),
                "drafts": draft_bytes_per_block(plan),
                "all": physical_bytes_per_block(plan, rank),
            }
            for rank in range(min(plan.ranks, MAX_RANKS))
        ],
        "layers": [
            {
                "name": bundle.layer,
                "owner": plan.owners[bundle.ordinal],
                "slot": plan.slot(bundle.ordinal),
                "bytes": bundle.bytes_per_block,
                "components": ", ".join(
                    f"{part.name} {part.bytes_per_block:,}" for part in bundle.spec.components
                ),
            }
            for bundle in plan.bundles
        ],
    }


def _node(node: Node) -> list[Any]:
    return [node.id, str(node.kind), node.stream, node.layer, node.owner, node.slot]


def _forward(
    number: int, runs: Sequence[Run], recordings: Sequence[Recording], tables: _Tables
) -> dict[str, Any]:
    first: dict[tuple[str, int], int] = {}
    for recording, record, _ in runs:
        key = (recording.clock, recording.stage)
        first[key] = min(record.began, first.get(key, record.began))
    return {
        "number": number,
        "runs": [
            {
                "recording": next(i for i, other in enumerate(recordings) if other is recording),
                "offset": record.began - first[recording.clock, recording.stage],
                **_run(record, overlap, tables),
            }
            for recording, record, overlap in runs
        ],
    }


def _run(record: ForwardRecord, overlap: ForwardOverlap, tables: _Tables) -> dict[str, Any]:
    """One forward of one rank.

    `starts` and `lengths` follow the nodes of the shape, null for what never ran. `waits` are [node, start,
    length]. `transfers` are [node, submitted, gate]: the gate is the node whose end let the transfer
    start, -1 the host's hook.
    """
    graph, began = record.graph, record.began
    spans = [record.spans.get(node.id) for node in graph.nodes]
    return {
        "shape": tables.shapes.number(
            replace(graph, nodes=tuple(replace(n, bytes=0) for n in graph.nodes))
        ),
        "bytes": tables.bytes.number(tuple(node.bytes for node in graph.nodes)),
        "ended": record.ended - began if record.ended else None,
        "error": record.error,
        "starts": [None if span is None else span.start - began for span in spans],
        "lengths": [None if span is None else span.duration for span in spans],
        "waits": [
            [graph.position[node], span.start - began, span.duration]
            for node, span in record.waits.items()
        ],
        "transfers": transfers_of(record),
        "figures": {
            "duration": overlap.duration_ns,
            "transfer": overlap.transfer_ns,
            "exposed": overlap.exposed_ns,
            "hidden": overlap.hidden_share,
            "overlap": overlap.overlap_percent,
            "bytes": overlap.bytes,
            "needed": overlap.needed_bytes,
            "free_transfers": overlap.free_transfers_ns,
            "free_compute": overlap.free_compute_ns,
        },
        "layers": [_layer(layer, graph, tables) for layer in overlap.layers],
        "critical": list(
            dict.fromkeys(graph.position[s.node] for s in overlap.critical_path if s.kind is not None)
        ),
    }


def _layer(layer: LayerOverlap, graph: Graph, tables: _Tables) -> list[Any]:
    parts = [
        [
            _CAUSES.index(part.cause),
            part.ns,
            tables.texts.number(part.detail),
            graph.position.get(part.node or ""),
        ]
        for part in layer.parts
    ]
    return [layer.layer, layer.bytes, layer.needed_bytes, layer.transfer_ns, layer.exposed_ns, parts]

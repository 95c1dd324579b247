"""The file form of a recording: JSON that another rank, run or tool can read. `recording_schema` describes it.

A recording is data from anywhere: what it names must exist, times must be in order and sizes in bounds, or
reading ends with a DumpError that names the place.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from kvpp_dag.errors import ConfigError, DumpError
from kvpp_dag.graph import Graph, Kind
from kvpp_dag.graph.json import GraphDump, from_dump, to_dump
from kvpp_dag.graph.order import direct_predecessors
from kvpp_dag.graph.reading import read_model
from kvpp_dag.plan import Bundle, CacheSpec, Component, StagePlan
from kvpp_dag.trace.files import MAX_DUMP_BYTES, read_dump
from kvpp_dag.trace.recording_schema import (
    KIND,
    MAX_LAYERS,
    SCHEMA_VERSION,
    ForwardForm,
    PlanForm,
    RecordingForm,
    SpecForm,
)
from kvpp_dag.trace.records import ForwardRecord, Recording, Span

PATTERNS = ("recording.*.json", "recording.*.json.gz")
"""Names of the files that `read_recordings` takes from a directory."""

MAX_NODE_RUNS = 2_000_000
"""Nodes of the graphs of all forwards of a recording, whether they ran or not."""

MAX_RECORDINGS = 256
MAX_TOTAL = 2 * MAX_DUMP_BYTES
"""Characters of all recordings of one directory."""


def to_recording_json(recording: Recording) -> str:
    """Write `recording` as one line of JSON. Graphs that are equal are written once."""
    graphs: dict[int, int] = {}  # by identity: forwards share the few graphs of their runtime
    kept: list[Graph] = []
    for record in recording.forwards:
        if id(record.graph) not in graphs:
            if record.graph not in kept:
                kept.append(record.graph)
            graphs[id(record.graph)] = kept.index(record.graph)
    dump = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "rank": recording.rank,
        "ranks": recording.ranks,
        "stage": recording.stage,
        "clock": recording.clock,
        "num_blocks": recording.num_blocks,
        "plan": None if recording.plan is None else _plan_form(recording.plan),
        "graphs": [to_dump(graph) for graph in kept],
        "forwards": [_forward_form(record, graphs[id(record.graph)]) for record in recording.forwards],
    }
    return json.dumps(dump, separators=(",", ":")) + "\n"


def _plan_form(plan: StagePlan) -> dict[str, Any]:
    return {
        "ranks": plan.ranks,
        "depth": plan.depth,
        "owners": plan.owners,
        "bundles": [asdict(bundle.spec) for bundle in plan.bundles],
        "drafts": [asdict(spec) for spec in plan.drafts],
    }


def _forward_form(record: ForwardRecord, graph: int) -> dict[str, Any]:
    return {
        "number": record.number,
        "graph": graph,
        "began": record.began,
        "ended": record.ended,
        "error": record.error,
        "needed_blocks": record.needed_blocks,
        "sent_blocks": record.sent_blocks,
        "submitted": list(record.submitted.items()),
        "spans": [(node, *span) for node, span in record.spans.items()],
        "waits": [(event, *span) for event, span in record.waits.items()],
        "missing": record.missing,
    }


def from_recording_json(text: str) -> Recording:
    """Read what `to_recording_json` wrote. Raises DumpError naming the place that cannot be read."""
    form = read_model(RecordingForm, text)
    if form.schema_version != SCHEMA_VERSION:
        raise DumpError(
            f"At schema_version: {form.schema_version}; this version reads {SCHEMA_VERSION}."
        )
    if form.rank >= form.ranks:
        raise DumpError(f"At rank: rank {form.rank} is not one of the {form.ranks} ranks.")
    plan = None if form.plan is None else _plan(form.plan, form)
    graphs = [_graph(dump, i, form) for i, dump in enumerate(form.graphs)]
    nodes = sum(len(graphs[f.graph].nodes) for f in form.forwards if f.graph < len(graphs))
    if nodes > MAX_NODE_RUNS:
        raise DumpError(
            f"At forwards: their graphs have {nodes} nodes together; at most {MAX_NODE_RUNS} are read."
        )
    forwards = tuple(_forward(forward, i, graphs) for i, forward in enumerate(form.forwards))
    return Recording(
        rank=form.rank,
        ranks=form.ranks,
        stage=form.stage,
        clock=form.clock,
        num_blocks=form.num_blocks,
        plan=plan,
        forwards=forwards,
    )


def _plan(form: PlanForm, recording: RecordingForm) -> StagePlan:
    if form.ranks != recording.ranks:
        raise DumpError(f"At plan.ranks: {form.ranks} ranks; the recording is of {recording.ranks}.")
    if len(form.owners) != len(form.bundles):
        raise DumpError(
            f"At plan.owners: {len(form.owners)} owners of {len(form.bundles)} bundles; expected one each."
        )
    for i, owner in enumerate(form.owners):
        if owner >= form.ranks:
            raise DumpError(f"At plan.owners.{i}: rank {owner} is not one of the {form.ranks} ranks.")
    bundles = tuple(
        Bundle(ordinal=i, spec=_spec(spec, f"plan.bundles.{i}")) for i, spec in enumerate(form.bundles)
    )
    return StagePlan(
        bundles=bundles,
        drafts=tuple(_spec(spec, f"plan.drafts.{i}") for i, spec in enumerate(form.drafts)),
        ranks=form.ranks,
        depth=form.depth,
        owners=tuple(form.owners),
    )


def _spec(form: SpecForm, place: str) -> CacheSpec:
    try:
        components = tuple(
            Component(name=c.name, bytes_per_block=c.bytes_per_block) for c in form.components
        )
    except ConfigError as error:
        raise DumpError(f"At {place}: {error}") from error
    return CacheSpec(
        layer=form.layer,
        index=form.index,
        components=components,
        draft=form.draft,
        shares_cache_of=form.shares_cache_of,
        group=form.group,
        replicated=form.replicated,
    )


def _graph(dump: GraphDump, place: int, recording: RecordingForm) -> Graph:
    """A graph of this recording's rank and plan, in which no nodes wait for each other."""
    try:
        graph = from_dump(dump)
    except DumpError as error:
        raise DumpError(f"In graph {place} of the recording: {error}") from error
    where = f"At graphs.{place}"
    if (graph.rank, graph.ranks) != (recording.rank, recording.ranks):
        raise DumpError(
            f"{where}: the graph is that of rank {graph.rank} of {graph.ranks}, the recording that of rank "
            f"{recording.rank} of {recording.ranks}."
        )
    layers = MAX_LAYERS if recording.plan is None else len(recording.plan.bundles)
    for node in graph.nodes:
        if node.layer is not None and node.layer >= layers:
            raise DumpError(f"{where}: {node.id} is of layer {node.layer}; expected less than {layers}.")
        if node.owner is not None and node.owner >= graph.ranks:
            raise DumpError(f"{where}: {node.id} has owner {node.owner}; there are {graph.ranks} ranks.")
    try:
        TopologicalSorter(dict(enumerate(direct_predecessors([graph])))).prepare()
    except CycleError as error:
        ring = [graph.nodes[i].id for i in error.args[1][:6]]
        raise DumpError(f"{where}: {', '.join(ring)} wait for each other in a ring.") from error
    return graph


def _forward(form: ForwardForm, place: int, graphs: Sequence[Graph]) -> ForwardRecord:
    where = f"At forwards.{place}"
    if form.graph >= len(graphs):
        raise DumpError(f"{where}.graph: graph {form.graph}; the recording holds {len(graphs)}.")
    if form.ended and form.ended < form.began:
        raise DumpError(f"{where}.ended: the forward ends before it begins.")
    graph = graphs[form.graph]
    waits = _spans(form.waits, graph, f"{where}.waits")
    for event in waits:
        if graph[event].kind is not Kind.COMPLETION:
            raise DumpError(f"{where}.waits: {event} is no completion event.")
    return ForwardRecord(
        number=form.number,
        graph=graph,
        began=form.began,
        ended=form.ended,
        error=form.error,
        needed_blocks=form.needed_blocks,
        sent_blocks=form.sent_blocks,
        submitted=_submitted(form, graph, f"{where}.submitted"),
        spans=_spans(form.spans, graph, f"{where}.spans"),
        waits=waits,
        missing=form.missing,
    )


def _submitted(form: ForwardForm, graph: Graph, where: str) -> dict[str, int]:
    times: dict[str, int] = {}
    for i, (node, time) in enumerate(form.submitted):
        _check_row(node, graph, times, f"{where}.{i}")
        times[node] = time
    return times


def _spans(rows: Sequence[tuple[str, int, int]], graph: Graph, where: str) -> dict[str, Span]:
    spans: dict[str, Span] = {}
    for i, (node, start, end) in enumerate(rows):
        _check_row(node, graph, spans, f"{where}.{i}")
        if end < start:
            raise DumpError(f"{where}.{i}: {node} ends before it starts.")
        spans[node] = Span(start, end)
    return spans


def _check_row(node: str, graph: Graph, seen: dict[str, Any], where: str) -> None:
    if node not in graph.position:
        raise DumpError(f"{where}: the graph has no node {node[:80]!a}.")
    if node in seen:
        raise DumpError(f"{where}: {node} was listed before.")


def read_recordings(path: Path) -> list[Recording]:
    """Read a recording, or those of a directory sorted by stage and rank.

    A directory's recordings are its files that match PATTERNS. Raises DumpError if there is none, if two are
    of one rank, if they are of groups of different sizes, or if one cannot be read.
    """
    if not path.is_dir():
        return [recording_from(path, read_dump(path))]
    files = sorted(file for pattern in PATTERNS for file in path.glob(pattern))
    if not files:
        raise DumpError(
            f"{path}: the directory holds no recording; looked for {' and '.join(PATTERNS)}."
        )
    if len(files) > MAX_RECORDINGS:
        raise DumpError(
            f"{path}: the directory holds {len(files)} recordings; at most {MAX_RECORDINGS} are read."
        )
    recordings: dict[tuple[int, int], tuple[Path, Recording]] = {}
    total = 0
    for file in files:
        text = read_dump(file)
        total += len(text)
        if total > MAX_TOTAL:
            raise DumpError(f"{path}: its recordings are larger than {MAX_TOTAL >> 20} MiB together.")
        recording = recording_from(file, text)
        first = next(iter(recordings.values()), (file, recording))
        if recording.ranks != first[1].ranks:
            raise DumpError(
                f"{path}: {first[0].name} is of a group of {first[1].ranks} ranks, {file.name} of one of "
                f"{recording.ranks}; keep the recordings of one run."
            )
        other, _ = recordings.setdefault((recording.stage, recording.rank), (file, recording))
        if other != file:
            raise DumpError(
                f"{path}: {other.name} and {file.name} are both of stage {recording.stage}, rank "
                f"{recording.rank}; keep one of them."
            )
    return [recording for _, (_, recording) in sorted(recordings.items(), key=lambda item: item[0])]


def recording_from(path: Path, text: str) -> Recording:
    """The recording in `text`, which is the content of `path`. Raises DumpError naming both places."""
    try:
        return from_recording_json(text)
    except DumpError as error:
        raise DumpError(f"{path}: {error}") from error


def is_recording(text: str) -> bool:
    """Whether `text`, if it can be read at all, is a recording and no graph."""
    return f'"{KIND}"' in text

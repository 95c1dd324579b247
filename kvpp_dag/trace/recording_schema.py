"""The file form of a recording as typed models: shapes and ranges, each checked with its place.

    {"schema_version": 1, "kind": "kvpp recording", "rank", "ranks", "stage", "clock", "num_blocks",
     "plan": {"ranks", "depth", "owners", "bundles", "drafts"} or null,
     "graphs": [graph dumps, see kvpp_dag.graph.to_json],
     "forwards": [{"number", "graph": index into graphs, "began", "ended", "error", "needed_blocks",
                   "sent_blocks", "submitted": [[node, t]], "spans": [[node, start, end]],
                   "waits": [[event, start, end]], "missing"}]}

Times are whole nanoseconds of the recording's clock. Rows instead of objects keyed by node keep errors and
memory bounded.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from kvpp_dag.graph.json import GraphDump

SCHEMA_VERSION = 1
KIND = "kvpp recording"
MAX_LAYERS = 10_000

_MAX_TIME = (1 << 63) - 1

Time = Annotated[int, Field(ge=0, le=_MAX_TIME)]
Size = Annotated[int, Field(ge=0, le=_MAX_TIME)]
Rank = Annotated[int, Field(ge=0, lt=1 << 20)]
Name = Annotated[str, Field(max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""A name made by an engine: anything but control characters."""

Rows = Annotated[list[tuple[str, Time, Time]], FailFast()]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ComponentForm(_Strict):
    """A component of a cache spec."""

    name: Name
    bytes_per_block: Size


class SpecForm(_Strict):
    """A cache spec."""

    layer: Name
    index: Size | None
    components: Annotated[list[ComponentForm], FailFast()]
    draft: bool
    shares_cache_of: Name | None
    group: Name
    replicated: bool


class PlanForm(_Strict):
    """A stage plan; `owners[i]` owns `bundles[i]`."""

    ranks: Annotated[int, Field(ge=1, le=1 << 20)]
    depth: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    owners: Annotated[list[Rank], FailFast()]
    bundles: Annotated[list[SpecForm], FailFast(), Field(max_length=MAX_LAYERS)]
    drafts: Annotated[list[SpecForm], FailFast(), Field(max_length=MAX_LAYERS)]


class ForwardForm(_Strict):
    """A forward; `graph` is an index into the recording's graphs."""

    number: Size
    graph: Annotated[int, Field(ge=0)]
    began: Time
    ended: Time
    error: str | None
    needed_blocks: Size | None
    sent_blocks: Size | None
    submitted: Annotated[list[tuple[str, Time]], FailFast()]
    spans: Rows
    waits: Rows
    missing: Size = 0


class RecordingForm(_Strict):
    """The whole file."""

    schema_version: int
    kind: Literal["kvpp recording"]
    rank: Rank
    ranks: Annotated[int, Field(ge=1, le=1 << 20)]
    stage: Annotated[int, Field(ge=0, lt=1 << 20)]
    clock: Name
    num_blocks: Size
    plan: PlanForm | None
    graphs: Annotated[list[GraphDump], FailFast()]
    forwards: Annotated[list[ForwardForm], FailFast()]

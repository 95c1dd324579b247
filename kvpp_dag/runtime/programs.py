"""Every kind of forward of one rank: compiled, verified and bound before the first one runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvpp_dag.graph import COMPUTE_STREAM, Graph, Policy, lower
from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.bind import BoundProgram, Call, bind
from kvpp_dag.runtime.compile import compile_forwards
from kvpp_dag.runtime.observer import Observer
from kvpp_dag.runtime.packing import BlockLists, packed_calls, run_calls
from kvpp_dag.runtime.payload import FULL, NOTHING, RUNS, Kind, Way, WayChooser
from kvpp_dag.runtime.streams import Stream
from kvpp_dag.runtime.transport import Transport

GENERATIONS = 2
"""Bindings of each kind, so that two forwards in flight share no event and no list of blocks."""


class Programs:
    """The bound programs of one rank, by kind and generation.

    `ended[g]` is recorded at the end of a forward of generation `g`; until it is reached, nothing of that
    generation may be used again. `lists[g]` are the blocks that it sends, if not all may be sent.
    """

    def __init__(
        self,
        arena: Arena,
        transport: Transport,
        streams: Mapping[str, Stream[Any]],
        *,
        policy: Policy,
        chooser: WayChooser | None,
        compare: tuple[Call, ...],
        observer: Observer | None,
        timeout: float,
        skip_broadcasts: bool,
        profiled: bool,
    ) -> None:
        """Compile, verify and bind; `chooser` is None where only whole bundles are sent.

        `compare` are the calls with which every forward that sends begins.
        """
        plan, num_blocks = arena.plan, arena.num_blocks
        chunks = chooser.chunk_counts() if chooser is not None else []
        self.graphs = compile_forwards(plan, arena.rank, num_blocks, policy, chunks)
        compute = streams[COMPUTE_STREAM]
        self.ended = [compute.event("the end of an earlier forward") for _ in range(GENERATIONS)]
        some = GENERATIONS if chooser is not None else 0
        self.lists = [BlockLists(num_blocks, arena.device) for _ in range(some)]
        kinds = {kind: lower(graph) for kind, graph in self.graphs.items()}
        if chooser is not None:
            kinds[RUNS] = kinds[FULL]
        whole = _whole_bundles(self.graphs[FULL], transport, arena)
        self._bound: dict[Kind, list[BoundProgram]] = {kind: [] for kind in kinds}
        for kind, program in kinds.items():
            for calls in _calls(kind, program.graph, transport, arena, self.lists, whole):
                bound = bind(
                    program,
                    streams=streams,
                    transfers=dict.fromkeys(calls, _nothing) if skip_broadcasts else calls,
                    observer=observer,
                    timeout=timeout,
                    first=compare if kind is not NOTHING else (),
                    profiled=profiled,
                )
                if bound.tape is not None:
                    packed = kind[0] is Way.PACKED
                    bound.tape.blocks = plan.staging_blocks(num_blocks) if packed else num_blocks
                self._bound[kind].append(bound)

    def of(self, kind: Kind, generation: int) -> BoundProgram:
        """The program of a kind; two forwards in flight must be of different generations."""
        return self._bound[kind][generation]


def send_bundle(transport: Transport, arena: Arena, ordinal: int) -> Call:
    """The broadcast of the whole bundle of target layer `ordinal`."""
    return transport.prepare(arena.cache(ordinal), arena.plan.owners[ordinal])


def _whole_bundles(graph: Graph, transport: Transport, arena: Arena) -> dict[str, Call]:
    return {node.id: send_bundle(transport, arena, node.layer or 0) for node in graph.broadcasts}


def _calls(
    kind: Kind,
    graph: Graph,
    transport: Transport,
    arena: Arena,
    lists: Sequence[BlockLists],
    whole: dict[str, Call],
) -> list[dict[str, Call]]:
    """What the broadcasts and copies of a kind of forward do, in each generation."""
    match kind[0]:
        case Way.NOTHING:
            return [{} for _ in range(GENERATIONS)]
        case Way.FULL:
            return [whole for _ in range(GENERATIONS)]
        case Way.RUNS:
            return [run_calls(graph, transport, arena, blocks) for blocks in lists]
        case Way.PACKED:
            return [packed_calls(graph, transport, arena, blocks) for blocks in lists]


def _nothing() -> None:
    """The transfer of a control run."""

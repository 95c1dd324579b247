"""Every kind of forward of one rank: compiled, verified and bound before the first one runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from kvpp_dag.graph import COMPUTE_STREAM, Graph, Policy, Program, lower
from kvpp_dag.runtime.arena import Arena
from kvpp_dag.runtime.bind import BoundProgram, Call, bind
from kvpp_dag.runtime.compile import compile_forwards
from kvpp_dag.runtime.observer import Observer
from kvpp_dag.runtime.packing import BlockLists, packed_calls, run_calls
from kvpp_dag.runtime.payload import FULL, NOTHING, RUNS, Kind, Way, WayChooser
from kvpp_dag.runtime.streams import Stream
from kvpp_dag.runtime.transport import Transport

CUT: Kind = (Way.FULL, 1)
"""A forward of whole bundles, of which the blocks in its list alone are sent: for the self check of large caches."""

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
        self.lists = _make_lists(arena) if chooser is not None else []
        self._transport, self._arena = transport, arena
        self._compare, self._skip_broadcasts = compare, skip_broadcasts
        self._bind = partial(
            bind, streams=streams, observer=observer, timeout=timeout, profiled=profiled
        )
        self._bound: dict[Kind, list[BoundProgram]] = {}
        kinds = {kind: lower(graph) for kind, graph in self.graphs.items()}
        if chooser is not None:
            kinds[RUNS] = kinds[FULL]
        whole = _whole_bundles(self.graphs[FULL], transport, arena)
        for kind, program in kinds.items():
            self._add(kind, program, _calls(kind, program.graph, transport, arena, self.lists, whole))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Every kind of forward there is."""
        return tuple(self._bound)

    def of(self, kind: Kind, generation: int) -> BoundProgram:
        """The program of a kind; two forwards in flight must be of different generations."""
        return self._bound[kind][generation]

    def add_cut(self) -> None:
        """Bind the program of whole bundles once more, as `CUT`, until `forget` is called."""
        self.lists = self.lists or _make_lists(self._arena)
        program = lower(self.graphs[FULL])
        calls = [run_calls(program.graph, self._transport, self._arena, some) for some in self.lists]
        self._add(CUT, program, calls)

    def forget(self) -> None:
        """Leave nothing of the forwards so far: neither `CUT` nor times on tapes."""
        self._bound.pop(CUT, None)
        for bound in chain(*self._bound.values()):
            if bound.tape is not None:
                bound.tape.clear()

    def _add(self, kind: Kind, program: Program, calls: Sequence[dict[str, Call]]) -> None:
        """Bind `program`, once for each of the `calls` of its broadcasts and copies."""
        self._bound[kind] = []
        for some in calls:
            bound = self._bind(
                program,
                transfers=dict.fromkeys(some, _nothing) if self._skip_broadcasts else some,
                first=self._compare if kind is not NOTHING else (),
            )
            if bound.tape is not None:
                blocks = self._arena.num_blocks
                packed = kind[0] is Way.PACKED
                bound.tape.blocks = self._arena.plan.staging_blocks(blocks) if packed else blocks
            self._bound[kind].append(bound)


def send_bundle(transport: Transport, arena: Arena, ordinal: int) -> Call:
    """The broadcast of the whole bundle of target layer `ordinal`."""
    return transport.prepare(arena.cache(ordinal), arena.plan.owners[ordinal])


def _make_lists(arena: Arena) -> list[BlockLists]:
    return [BlockLists(arena.num_blocks, arena.device) for _ in range(GENERATIONS)]


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

"""LI-C8 and SFA-C8 under KVPP: every rank computes to the bit what it computes when it keeps everything.

Real processes over gloo serve the same requests in several ways: `plain`, without KVPP; with KVPP, scratch
being NaN or garbage before every forward; and controls that leave part of a bundle out.
"""

import pytest

from kvpp_dag.graph import Policy
from tests.reference.caches import Kvpp
from tests.reference.engine import Served, Topology
from tests.reference.model import Config
from tests.reference.worker import serve_all
from tests.runtime_support import run_processes

LAYERS = Config().layers
TOPOLOGIES = {
    "tp2": Topology(tp=2, stages=(range(LAYERS),)),
    "tp3": Topology(tp=3, stages=(range(LAYERS),)),
    "pp2 x tp2": Topology(tp=2, stages=(range(5), range(5, LAYERS))),
}
SAME = {
    "nan in scratch": Kvpp(poison=0xFF),
    "garbage in scratch, on_release, depth 2": Kvpp(poison=None, policy=Policy.ON_RELEASE, depth=2),
}
CONTROLS = {
    "no broadcast": Kvpp(sent=()),
    "no broadcast, other bytes in scratch": Kvpp(sent=(), poison=0x3A),
    "main only": Kvpp(sent=("main",)),
    "no scales": Kvpp(sent=("main", "indexer")),
    "no main": Kvpp(sent=("indexer", "scales")),
}
CASES = [
    ("li-c8", "tp2"),
    ("sfa-c8", "tp2"),
    ("li-c8", "tp3"),
    ("sfa-c8", "tp3"),
    ("li-c8", "pp2 x tp2"),
    ("sfa-c8", "pp2 x tp2"),
]

Ranks = list[dict[str, Served]]


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def case(request: pytest.FixtureRequest) -> tuple[Topology, Ranks]:
    layout, name = request.param
    topology, ways = TOPOLOGIES[name], {"plain": None} | SAME | CONTROLS
    ranks = run_processes(topology.world, serve_all, topology, layout, ways, timeout=30.0)
    for rank in ranks:
        assert isinstance(rank, dict), rank
    return topology, ranks


@pytest.fixture
def topology(case: tuple[Topology, Ranks]) -> Topology:
    return case[0]


@pytest.fixture
def ranks(case: tuple[Topology, Ranks]) -> Ranks:
    return case[1]


@pytest.mark.parametrize("way", SAME)
def test_outputs_are_equal_to_the_bit(ranks: Ranks, way: str):
    for rank in ranks:
        plain, served = rank["plain"], rank[way]
        assert served.outputs == plain.outputs
        assert served.tokens == plain.tokens
        assert served.finite
        assert len(served.outputs) > 15


@pytest.mark.parametrize("way", CONTROLS)
def test_controls_differ_from_the_first_forward_with_history_on(ranks: Ranks, way: str):
    for rank in ranks:
        plain, control = rank["plain"], rank[way]
        same = [a == b for a, b in zip(plain.outputs, control.outputs, strict=False)]
        assert same.index(False) == plain.history.index(True) > 0


def test_what_lies_in_scratch_would_be_seen_without_broadcasts(ranks: Ranks):
    for rank in ranks:
        nan, other = rank["no broadcast"], rank["no broadcast, other bytes in scratch"]
        assert not nan.finite
        assert nan.outputs != other.outputs


def kept_by_plain(rank: dict[str, Served], way: str) -> list[dict[str, str]]:
    """After each forward, what the plain run holds of the layers that this rank keeps in `way`."""
    plain, kept = rank["plain"].kept, rank[way].kept
    return [{layer: all_[layer] for layer in k} for all_, k in zip(plain, kept, strict=False)]


@pytest.mark.parametrize("way", SAME)
def test_owned_and_draft_caches_are_equal_after_every_forward(ranks: Ranks, way: str):
    """Buffers start out with one sentinel everywhere, so bytes that nobody writes are compared as well."""
    for rank in ranks:
        assert len(rank[way].kept) == len(rank["plain"].kept)
        assert rank[way].kept == kept_by_plain(rank, way)


@pytest.mark.parametrize("way", CONTROLS)
def test_controls_spoil_the_caches_in_the_first_forward_with_history(ranks: Ranks, way: str):
    for rank in ranks:
        before, after = rank[way].kept
        assert before == kept_by_plain(rank, way)[0]
        assert after != kept_by_plain(rank, way)[1]


@pytest.mark.parametrize("way", SAME)
def test_a_target_layer_is_kept_once_and_a_draft_layer_on_every_rank_of_its_stage(
    topology: Topology, ranks: Ranks, way: str
):
    for stage, layers in enumerate(topology.stages):
        drafts = ["mtp.0"] if layers.stop == LAYERS else []
        kept = [layer for rank in topology.ranks(stage) for layer in ranks[rank][way].kept[0]]
        assert sorted(kept) == [f"layers.{i}" for i in layers] + drafts * topology.tp


def test_nothing_is_written_around_a_buffer(ranks: Ranks):
    """Draft caches included; before and behind every buffer lie sentinels."""
    assert all(served.intact for rank in ranks for served in rank.values())


@pytest.mark.parametrize(
    "what",
    [
        "split prompts",
        "forwards with prompts and outputs",
        "forwards with history",
        "forwards without history while others have some",
        "shared blocks of running requests",
        "shared blocks of ended requests",
        "shared blocks that the same forward fills",
        "blocks with old bytes",
        "accepted drafts",
        "rejected drafts",
    ],
)
def test_the_requests_bring_about(ranks: Ranks, what: str):
    assert ranks[0]["plain"].seen[what] > 0

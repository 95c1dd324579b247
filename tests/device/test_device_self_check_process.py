"""The self check between real processes, over collectives that the transfer stream orders."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from kvpp_dag.graph import COMPUTE_STREAM, COPY_STREAM, TRANSFER_STREAM, Policy
from tests.device.build import build_test_device
from tests.device.self_check_process import check_in_process
from tests.device.self_check_ranks import Check

RANKS = 2
PASSES = {
    "on_acquire": Check(),
    "on_release": Check(policy=Policy.ON_RELEASE, depth=2),
    "many layers": Check(layers=40),
}
DROPPED = (COMPUTE_STREAM, TRANSFER_STREAM, COPY_STREAM)


@pytest.fixture(scope="module")
def said(pytestconfig, tmp_path_factory):
    """By self check, what each rank has said; all in one start of the processes."""
    checks = PASSES | {name: Check(dropped=name) for name in DROPPED}
    work = partial(
        check_in_process,
        folder=str(tmp_path_factory.mktemp("store")),
        library=str(build_test_device(pytestconfig.cache.mkdir("kvpp_device"))),
        size=RANKS,
        checks=checks | {"nothing sent": Check(skip_broadcasts=True)},
    )
    with ProcessPoolExecutor(RANKS, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = list(pool.map(work, range(RANKS)))
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("name", PASSES)
def test_it_passes(said, simulated, name):
    for text in said[name]:
        assert text.startswith("passed: ")


@pytest.mark.parametrize("name", [*DROPPED, "nothing sent"])
def test_control_every_rank_refuses(said, simulated, name):
    assert all(text.startswith("SelfCheckError: The self check") for text in said[name]), said[name]
    assert any("first wrong block" in text for text in said[name])

"""ProcessGroupTransport on device tensors: real processes, broadcasts ordered by the transfer stream."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from kvpp_dag.graph import COMPUTE_STREAM
from tests.device.build import build_test_device
from tests.device.process_work import serve_in_process
from tests.device.ranks import Setting, reference

LAYERS, BLOCKS, RANKS = 5, (0, 1, 2, 0, 1), 2
SETTINGS = {
    "slow compute": Setting(compute_delay=0.003),
    "slow transfers": Setting(transfer_delay=0.003),
    "control": Setting(transfer_delay=0.02, dropped=COMPUTE_STREAM),
}


@pytest.fixture(scope="module")
def served(pytestconfig, tmp_path_factory):
    """What each rank has served, by setting; all in one start of the processes."""
    work = partial(
        serve_in_process,
        folder=str(tmp_path_factory.mktemp("store")),
        library=str(build_test_device(pytestconfig.cache.mkdir("kvpp_device"))),
        size=RANKS,
        layers=LAYERS,
        blocks=BLOCKS,
        settings=tuple(SETTINGS.values()),
    )
    with ProcessPoolExecutor(RANKS, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = list(pool.map(work, range(RANKS)))
    return dict(zip(SETTINGS, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("setting", ["slow compute", "slow transfers"])
def test_processes_compute_what_one_rank_computes(served, simulated, setting):
    expected = reference(simulated, LAYERS, BLOCKS)
    for rank in served[setting]:
        assert rank.outputs == expected.outputs
        assert rank.owned == {ordinal: expected.owned[ordinal] for ordinal in rank.owned}


def test_control_compute_that_does_not_wait_is_caught(served, simulated):
    expected = reference(simulated, LAYERS, BLOCKS)
    for rank in served["control"]:
        assert rank.outputs[0] == expected.outputs[0]
        assert rank.outputs[1] != expected.outputs[1]

"""The stand-in operators: on the device's streams, and computing what plain torch computes."""

import json
import os
import subprocess
import sys

import pytest

from tests.npu.engine import RELEASED, REPOSITORY, engine_variables

pytestmark = [pytest.mark.npu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def found(library):
    done = subprocess.run(
        [sys.executable, "-m", "tests.npu.operators_run"],
        env=os.environ | engine_variables(RELEASED, library),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


def test_an_operator_runs_on_the_stream_later_than_it_is_submitted(found):
    assert found["later"] == [0, 1]


@pytest.mark.parametrize("what", ["norm", "row", "paged", "chosen", "merged"])
def test_it_computes_what_plain_torch_computes(found, what):
    assert found[what] < 1e-5


def test_what_is_quantised_comes_back_within_half_a_step(found):
    assert 0 < found["quantised"] < 0.501

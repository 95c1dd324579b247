"""Every seam, looked at in vllm-ascend as it is when it is imported; and what importing the worker changes."""

import json
import os
import subprocess
import sys

import pytest

from tests.npu.engine import OWN_KVPP, RELEASED, REPOSITORY, engine_variables

pytestmark = [pytest.mark.npu, pytest.mark.timeout(900)]

LOOK = """
import json, sys
import vllm_ascend.worker.worker
from tests.support.import_purity import names
before = dict(names())
import kvpp_vllm.ascend.worker
from kvpp_vllm.ascend import own, seams
from kvpp_vllm.seams import _problem
tables = ("ASCEND_SEAMS", "OWN_SEAMS", "ASCEND_CONFIG_SEAMS")
found = {t: [f"{s.attribute} {p}" for s in getattr(seams, t) if (p := _problem(s))] for t in tables}
after = dict(names())
changed = sorted(name for name, value in before.items() if after.get(name) is not value)
from vllm_ascend.attention.mla_v1 import AscendMLAImpl
from vllm_ascend.attention.sfa_v1 import AscendSFAImpl
from kvpp_vllm.ascend.hooks import IMPLEMENTATIONS
kinds = {f"{k.__module__}.{k.__qualname__}": k for k in (AscendMLAImpl, AscendSFAImpl)}
methods = {
    name: [m for m in (*known.acquire, *known.acquire_fused, known.release) if hasattr(kinds[name], m)]
    for name, known in IMPLEMENTATIONS.items()
}
print("FOUND " + json.dumps([found, own.own_kvpp(), changed, methods]))
"""


@pytest.fixture(scope="module", params=[RELEASED, OWN_KVPP])
def looked(request, library):
    """The stack, problems by table, whether it has a KVPP of its own, names changed, methods there."""
    variables = os.environ | engine_variables(request.param, library)
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env=variables,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return request.param, *json.loads(line.removeprefix("FOUND "))


def test_the_seams_of_this_generation_hold_and_the_other_ones_do_not(looked):
    stack, problems, *_ = looked
    mine, other = ("ASCEND_SEAMS", "OWN_SEAMS") if stack == RELEASED else ("OWN_SEAMS", "ASCEND_SEAMS")
    assert problems[mine] == []
    assert problems["ASCEND_CONFIG_SEAMS"] == []
    assert problems[other] != []


def test_which_generation_has_a_kvpp_of_its_own(looked):
    stack, _, own, *_ = looked
    assert own == (stack == OWN_KVPP)


def test_importing_the_worker_changes_no_name_of_torch_or_an_engine(looked):
    assert looked[3] == []


def test_every_method_that_is_wrapped_is_there_on_the_released_version(looked):
    from kvpp_vllm.ascend.hooks import IMPLEMENTATIONS

    stack, *_, methods = looked
    if stack == RELEASED:
        for name, known in IMPLEMENTATIONS.items():
            assert methods[name] == [*known.acquire, *known.acquire_fused, known.release]

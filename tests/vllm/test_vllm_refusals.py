"""KVPP asked for and not possible is an error of one sentence; not asked for, it changes nothing."""

import json
import subprocess
import sys

import pytest

from kvpp_dag.errors import NotActiveError
from kvpp_vllm.demo.engine import environment
from kvpp_vllm.seams import SEAMS, Seam, check_seams
from tests.support.models import write_dense_checkpoint
from tests.support.vllm_cpu import REPOSITORY

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    dense = write_dense_checkpoint(tmp_path_factory.mktemp("models") / "dense")
    import os

    return subprocess.run(
        [sys.executable, "-O", "-m", "tests.vllm.refusals", checkpoint, str(dense)],
        cwd=REPOSITORY,
        env=os.environ | environment(ranks=2),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )


@pytest.fixture(scope="module")
def cases(run) -> dict[str, str]:
    line = next(line for line in run.stdout.splitlines() if line.startswith("CASES "))
    return json.loads(line.removeprefix("CASES "))


def test_asked_for_it_replaces_the_worker_class(cases):
    assert cases["on"] == "kvpp_vllm.worker.KvppCPUWorker"


@pytest.mark.parametrize("case", ["off", "false"])
def test_not_asked_for_it_leaves_the_worker_class(cases, case):
    assert cases[case] == CPU_WORKER


def test_one_rank_is_a_warning_and_changes_nothing(cases, run):
    assert "UniProc" not in cases["tp1"]
    assert cases["tp1"] == CPU_WORKER
    warning = "KVPP was asked for at tensor parallel size 1"
    assert warning in run.stdout + run.stderr


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("not eager", "--enforce-eager"),
        ("not mla", "does not use MLA"),
        ("unknown key", "unknown setting 'trace_dri'; the settings are trace_dir"),
        ("not a boolean", "enable_kvpp is 'yes'; expected true or false"),
        ("not an object", "kvpp is 3; expected an object"),
        ("relative trace_dir", "expected an absolute path"),
        ("bad timeout", "kvpp.timeout_s is -1"),
        ("connector", "--kv-transfer-config"),
        ("other worker", "the worker class is " + CPU_WORKER),
    ],
)
def test_refused_in_one_sentence_that_names_the_setting(cases, case, words):
    message = cases[case]
    assert message.startswith("NotActiveError: KVPP was asked for and cannot be active: ")
    assert words in message
    assert message.endswith(".")
    assert "\n" not in message


def test_the_installed_vllm_has_every_seam():
    check_seams()


@pytest.mark.parametrize(
    "changed",
    [
        Seam(module="vllm.no_such_module", attribute="anything", use="a test"),
        Seam(module="vllm.config", attribute="VllmConfig.no_such_method", use="a test"),
        Seam(module="vllm.config", attribute="VllmConfig", fields=("no_such_field",), use="a test"),
        Seam(
            module="vllm.v1.worker.gpu_worker",
            attribute="Worker.execute_model",
            parameters=("scheduler_output", "another"),
            use="a test",
        ),
    ],
)
def test_a_missing_or_changed_seam_is_an_error_that_names_it(changed):
    with pytest.raises(NotActiveError, match=rf"{changed.module}\.{changed.attribute}"):
        check_seams((*SEAMS, changed))

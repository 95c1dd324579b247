"""Importing the plugin, and checking the seams of a worker, changes no name in torch or vLLM."""

import json
import os
import subprocess
import sys

import pytest

from kvpp_vllm.demo.engine import environment
from tests.support.vllm_cpu import REPOSITORY

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"


def replaced(base: str, *modules: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.import_purity", base, *modules],
        cwd=REPOSITORY,
        env=os.environ | environment(ranks=2),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("base", [CPU_WORKER, GPU_WORKER])
def test_importing_the_plugin_changes_no_name(base):
    assert replaced(base) == []


def test_control_vllms_cpu_worker_changes_names_of_torch():
    found = replaced(GPU_WORKER, "vllm.v1.worker.cpu_worker")
    assert {"torch.Event", "torch.cuda.Stream", "torch.accelerator.synchronize"} <= set(found)
    assert {"torch.Tensor.pin_memory", "torch.Tensor.record_stream"} <= set(found)

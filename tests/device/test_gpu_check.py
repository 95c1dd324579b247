"""The script for a person with one GPU."""

import os
import subprocess
import sys
from pathlib import Path

from scripts.gpu_check import RIGHT, WRONG

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "none"}


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_without_an_accelerator_it_says_so_and_exits_2():
    done = run(**NO_DEVICES)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "torch finds no accelerator on this machine, so there is nothing to check.\n"


def test_it_gives_a_verdict_and_figures(device, pytestconfig):
    done = run("--test-device", str(pytestconfig.cache.mkdir("kvpp_device")))
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[0].startswith(f"device: {device.torch.type}")
    assert sum(line.startswith("ok  ") for line in lines) == len(RIGHT) + len(WRONG) > 10
    assert any(line.startswith("host, per layer: ") for line in lines)
    assert lines[-1] == "verdict: right"

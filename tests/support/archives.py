"""Released packages as sources to read, fetched with pip; nothing is installed in the environment of the tests."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.static_seams import Sources


def wheel_sources(requirement: str, directory: Path) -> Sources:
    """Sources in the wheel of `requirement`, say "vllm==0.33.0"; no package it needs is fetched."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(directory), requirement], check=True)
    (wheel,) = directory.glob("*.whl")
    return Sources(roots=(zipfile.Path(wheel),))

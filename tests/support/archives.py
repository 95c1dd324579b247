"""Released packages as sources to read, fetched with pip; nothing is installed in the environment of the tests."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

from tests.support.static_seams import Sources

BUILD_TOOLS = ("setuptools", "setuptools_scm", "wheel", "pybind11", "cmake")


def wheel_sources(requirement: str, directory: Path) -> Sources:
    """Sources in the wheel of `requirement`, say "vllm==0.33.0"; no package it needs is fetched."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(directory), requirement], check=True)
    (wheel,) = directory.glob("*.whl")
    return Sources(roots=(zipfile.Path(wheel),))


def ascend_sources(version: str, directory: Path) -> Sources:
    """Sources of vllm-ascend, which is released as an archive alone.

    pip asks an archive for its metadata even to download it, and this one's wants to know the chip and its
    build tools; a virtual environment in `directory` has them.
    """
    environment = directory / "build"
    venv.create(environment, with_pip=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *BUILD_TOOLS], check=True)
    command = [*pip, "download", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--dest", str(directory), f"vllm-ascend=={version}"],
        env=os.environ | {"SOC_VERSION": "ascend910b1", "COMPILE_CUSTOM_KERNELS": "0"},
        check=True,
    )
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return Sources(roots=(directory / archive.name.removesuffix(".tar.gz"),))

"""The built wheel, installed with its dependencies in an environment of its own, brings command and plugin."""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CONSTRAINTS = REPOSITORY / "constraints.txt"

CHECK = """
import importlib.metadata, kvpp_dag, kvpp_vllm
(entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvpp")
assert entry.load().__module__ == "kvpp_vllm.plugin"
print(kvpp_dag.__file__, kvpp_vllm.__file__)
"""


def run(*command: object) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=280, check=False, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_the_wheel_brings_the_command_and_the_plugin(tmp_path):
    source = tmp_path / "source"
    run("git", "clone", "--quiet", REPOSITORY, source)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, "torch")
    run(python, "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, wheel)
    files = run(python, "-I", "-c", CHECK)  # isolated: the working directory holds the sources
    assert files.count(str(tmp_path / "env")) == 2
    command = tmp_path / "env" / "bin" / "kvpp-dag"
    assert '"capacity_multiplier": 6.34' in run(
        command, "plan", "--preset", "glm-5.2-lic8", "--tp", 8, "--json"
    )


def test_the_wheel_is_told_of_every_package():
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    named = settings["tool"]["setuptools"]["packages"]
    found = [
        ".".join(path.parent.relative_to(root).parts)
        for root in (REPOSITORY, REPOSITORY / "integrations")
        for name in ("kvpp_dag", "kvpp_vllm")
        for path in (root / name).rglob("__init__.py")
    ]
    assert sorted(named) == sorted(found)

"""Real vLLM: one checkpoint for all tests, and the prompts they share."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from kvpp_vllm.demo.checkpoint import write_checkpoint
from tests.vllm.refusal_models import run_refusals

LAYERS = 12


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "mla", layers=LAYERS))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight prompts of mixed lengths, from below a block to several blocks."""
    generator = random.Random(1)
    return [[generator.randrange(2, 300) for _ in range(n)] for n in (3, 16, 17, 40, 64, 77, 100, 150)]


@pytest.fixture(scope="session")
def refusals_run(
    checkpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> subprocess.CompletedProcess[str]:
    return run_refusals(tmp_path_factory.mktemp("models"), Path(checkpoint))


@pytest.fixture(scope="session")
def cases(refusals_run: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What vLLM and the plugin say of every case of `tests.vllm.refusals`."""
    line = next(line for line in refusals_run.stdout.splitlines() if line.startswith("CASES "))
    found: dict[str, str] = json.loads(line.removeprefix("CASES "))
    return found

"""vLLM's GPU worker on the test device: its library, a model and prompts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.device.build import build_test_device
from tests.support.gpu_platform import Faults, with_faults
from tests.support.workload import Workload, kvpp
from tests.vllm.conftest import LAYERS, checkpoint, prompts

__all__ = ["LAYERS", "checkpoint", "prompts"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def library(pytestconfig) -> str:
    """The test device; built once for all sessions that share pytest's cache."""
    return str(build_test_device(pytestconfig.cache.mkdir("kvpp_device")))


def on_device(
    workload: Workload, settings: dict[str, Any] | None, faults: Faults | None = None
) -> Workload:
    """`workload` with KVPP off (None) or on with `settings`, with `faults`, and the facts of every worker."""
    changed = kvpp(workload, settings)
    engine = changed.engine if faults is None else with_faults(changed.engine, faults)
    return replace(changed, engine=engine, rpc=[*changed.rpc, "device_facts"])

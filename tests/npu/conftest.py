"""Collected in the environment of `make test-npu` alone: nothing here can run without vllm-ascend and its vLLM."""

from pathlib import Path

import pytest

from tests.npu.engine import STACKS

if not STACKS.exists():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def library(pytestconfig) -> Path:
    """The compiled device."""
    from tests.device.build import build_test_device

    return build_test_device(pytestconfig.cache.mkdir("kvpp_device"))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> "dict[str, str]":
    """Checkpoints by name."""
    from kvpp_vllm.demo.checkpoint import write_checkpoint
    from tests.support.checkpoints import write_moe_checkpoint, write_mtp_checkpoint
    from tests.support.sparse_models import write_sparse_checkpoint

    folder = tmp_path_factory.mktemp("models")
    written = {
        "dense": write_checkpoint(folder / "dense", layers=10),
        "experts": write_moe_checkpoint(folder / "experts", layers=8),
        "deep": write_checkpoint(folder / "deep", layers=16),
        "mtp": write_mtp_checkpoint(folder / "mtp", layers=8),
        "sparse": write_sparse_checkpoint(folder / "sparse", family="deepseek", layers=8),
        # Layers without an indexer read the choice of others from a buffer as wide as the
        # model says, into which vllm-ascend puts 2048.
        "shared": write_sparse_checkpoint(folder / "shared", family="glm", layers=8, index_topk=2048),
    }
    return {name: str(place) for name, place in written.items()}

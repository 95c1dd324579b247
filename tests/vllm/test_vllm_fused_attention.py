"""DeepSeek-V3.2's fused paths on CUDA and ROCm, checked statically: their kernels do not run here.

The sources of the installed vLLM are read, not imported.
"""

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpp_vllm.attention import ATTENTION_SEAMS, ATTENTIONS
from tests.support.static_seams import Sources

CUDA = "vllm.models.deepseek_v32.attention"
ROCM = "vllm.models.deepseek_v32.amd.rocm"


@pytest.fixture(scope="module")
def sources() -> Sources:
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    return Sources(roots=(Path(package.origin).parents[1],))


def calls(function: ast.stmt) -> list[str]:
    """What a function calls, dotted, in the order of the source."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [ast.unparse(n.func) for n in sorted(found, key=lambda n: (n.lineno, n.col_offset))]


def lines_with(function: ast.stmt, word: str) -> list[int]:
    """Lines of a function that use an attribute of this name."""
    return [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr == word
    ]


@pytest.mark.parametrize("seam", ATTENTION_SEAMS, ids=lambda seam: seam.attribute)
def test_every_seam_is_in_the_sources(sources, seam):
    assert sources.problem(seam) is None
    assert sources.problem(replace(seam, parameters=("other",))) is not None


def test_a_listed_class_defines_its_forward(sources):
    """The class whose `forward` runs decides where KVPP hooks."""
    for name in ATTENTIONS:
        module, _, attention = name.rpartition(".")
        found_in, _ = sources.find(module, f"{attention}.forward")
        assert found_in == module


def test_cuda_prepares_before_the_kernel_that_writes_both_caches(sources):
    _, forward = sources.find(CUDA, "DeepseekV32Attention.forward")
    order = [call for call in calls(forward) if "prepare_for_batch" in call or "fused_norm_rope" in call]
    assert order == ["self.impl.prepare_for_batch", "fused_norm_rope"]
    prepared = lines_with(forward, "prepare_for_batch")[0]
    assert min(lines_with(forward, "kv_cache")) > prepared


def test_cuda_uses_no_cache_after_the_method_that_releases(sources):
    _, forward = sources.find(CUDA, "DeepseekV32Attention.forward")
    assert calls(forward)[-2:] == ["self._sparse_indexer_and_attn", "self.o_proj"]
    last = lines_with(forward, "_sparse_indexer_and_attn")[-1]
    assert max(lines_with(forward, "kv_cache")) < last


def test_cuda_calls_neither_hook_of_the_generic_path_for_its_writes(sources):
    """So that the generic entry would never acquire: the reason for an entry of its own."""
    _, forward = sources.find(CUDA, "DeepseekV32Attention.forward")
    assert "self.prepare_kv_cache_update" not in calls(forward)
    _, attend = sources.find(CUDA, "DeepseekV32Attention._sparse_indexer_and_attn")
    assert "sparse_attn_indexer" in calls(attend)
    assert "self.indexer.indexer_op" not in calls(attend)


def test_rocm_uses_both_caches_inside_one_method(sources):
    _, fused = sources.find(ROCM, "DeepseekV32MLAAttention._fused_attention")
    assert {"fused_norm_rope", "self._run_indexer", "self.impl.forward_mqa"} <= set(calls(fused))
    _, forward = sources.find(ROCM, "DeepseekV32MLAAttention.forward")
    assert lines_with(forward, "kv_cache") == []
    assert calls(forward)[-2:] == ["self._fused_attention", "self.o_proj"]

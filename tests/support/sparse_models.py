"""Small sparse-MLA checkpoints: DeepSeek-V3.2, GLM-DSA with shared indexes, and the dense model of the same weights."""

from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import torch

from kvpp_vllm.demo.checkpoint import QUERY_KEY_SPREAD, model_weights
from tests.support import stock_fixes
from tests.support.checkpoints import add_draft_layer, v3_config, write_model

QUERY_RANK = 64
INDEX_HEADS, INDEX_WIDTH = 4, 128

FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "deepseek": {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"},
    "glm": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "index_topk_freq": 2,
        "index_skip_topk_offset": 2,
        "indexer_rope_interleave": True,
    },
}
"""With a frequency of 2, GLM's layers 0, 1, 3, 5, ... have an indexer; the others use the choice made before them."""


def write_sparse_checkpoint(
    directory: Path, *, family: str, layers: int, index_topk: int = 64, draft_layer: bool = False
) -> Path:
    """Write a model of `FAMILIES`; the same weights for all, as far as the family has them.

    With `draft_layer` there is one, which is sparse as well, it is to the rest what it is in `write_mtp_checkpoint`.
    """
    config = v3_config(layers) | {"q_lora_rank": QUERY_RANK} | FAMILIES[family]
    config["num_nextn_predict_layers"] = int(draft_layer)
    if family != "dense":
        config |= {
            "index_topk": index_topk,
            "index_n_heads": INDEX_HEADS,
            "index_head_dim": INDEX_WIDTH,
        }
    if family == "glm":
        config["rope_parameters"] = config.pop("rope_scaling") | {
            "rope_type": "yarn",
            "rope_theta": config.pop("rope_theta"),
        }
    weights = dict(model_weights(config, seed=0))
    if draft_layer:
        add_draft_layer(weights, config)
    weights = {n: t for n, t in weights.items() if not n.endswith("self_attn.q_proj.weight")}
    generator = torch.Generator().manual_seed(3)
    for layer in range(layers + draft_layer):
        for name, tensor in _low_rank_queries(config, generator):
            weights[f"model.layers.{layer}.self_attn.{name}"] = tensor
    for layer in range(layers + draft_layer) if family != "dense" else ():
        if layer >= layers or not _shares_index(config, layer):
            for name, tensor in _indexer(config, torch.Generator().manual_seed(100 + layer)):
                weights[f"model.layers.{layer}.self_attn.indexer.{name}"] = tensor
    return write_model(directory, config, weights)


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of an engine that serves these models; writes entry points of plugins to `directory`."""
    stock_fixes.plugin(directory)
    return {"PYTHONPATH": str(plugin(directory))}


def plugin(directory: Path, module: str = "tests.support.sparse_cpu") -> Path:
    """Write an entry point of vLLM's plugin group that names `register` of `module` into `directory`, and return it."""
    info = directory / "kvpp_sparse_cpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpp-sparse-cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nkvpp_sparse_cpu = {module}:register\n"
    )
    return directory


def _shares_index(config: dict[str, Any], layer: int) -> bool:
    frequency = config.get("index_topk_freq", 1)
    return bool(max(layer - config.get("index_skip_topk_offset", 2) + 1, 0) % frequency)


def _low_rank_queries(
    config: dict[str, Any], generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    yield "q_a_proj.weight", _matrix(QUERY_RANK, hidden, generator)
    yield "q_a_layernorm.weight", torch.ones(QUERY_RANK)
    yield "q_b_proj.weight", QUERY_KEY_SPREAD * _matrix(width, QUERY_RANK, generator)


def _indexer(config: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    hidden = config["hidden_size"]
    yield "wq_b.weight", _matrix(INDEX_HEADS * INDEX_WIDTH, QUERY_RANK, generator)
    yield "wk.weight", _matrix(INDEX_WIDTH, hidden, generator)
    yield "weights_proj.weight", _matrix(INDEX_HEADS, hidden, generator)
    yield "k_norm.weight", torch.ones(INDEX_WIDTH)
    yield "k_norm.bias", torch.zeros(INDEX_WIDTH)


def _matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) / sqrt(columns)

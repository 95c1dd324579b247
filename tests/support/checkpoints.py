"""Variants of the demo's checkpoint that only tests need: experts, and a DeepSeek-V3 with a draft layer.

Both are `DeepseekV3ForCausalLM`, whose attention is that of the demo's `DeepseekV2ForCausalLM`.
"""

import json
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvpp_vllm.demo.checkpoint import (
    BOS,
    EOS,
    MLP_OUTPUT_SPREAD,
    build_tokenizer,
    model_config,
    model_weights,
)

EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE = 8, 2, 64

# A guessable token is one whose successor is nearly always the same; the draft layer is made to know those.
GUESSABLE_SCALE = 8.0
GUESSABLE_PULL = 1.0
DRAFT_EMBEDDING_SPREAD = 1.5


def write_moe_checkpoint(directory: Path, *, layers: int) -> Path:
    """Write a model whose layers have 8 routed experts (2 a token) and a shared one, the first layer excepted."""
    config = v3_config(layers) | {
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "n_shared_experts": 1,
        "moe_intermediate_size": EXPERT_SIZE,
    }
    weights = dict(model_weights(config, seed=0))
    generator = torch.Generator().manual_seed(1)
    for layer in range(1, layers):
        prefix = f"model.layers.{layer}.mlp."
        for name in [name for name in weights if name.startswith(prefix)]:
            del weights[name]
        weights |= {prefix + name: tensor for name, tensor in _experts(config, generator)}
    return write_model(directory, config, weights)


def write_mtp_checkpoint(directory: Path, *, layers: int) -> Path:
    """Write a dense model with one draft (nextn) layer that guesses some of its tokens.

    Half of the tokens are guessable: their embedding outweighs what the layers add, and the output layer answers
    it with a fixed successor. The other half depends on the history, as in the demo's model. The draft layer sees
    the embedding of the newest token, so it is right after a guessable one and seldom elsewhere.
    """
    config = v3_config(layers) | {"num_nextn_predict_layers": 1}
    weights = dict(model_weights(config, seed=0))
    add_draft_layer(weights, config)
    return write_model(directory, config, weights)


def add_draft_layer(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Add the draft layer of `write_mtp_checkpoint`, and make half of the tokens guessable."""
    generator = torch.Generator().manual_seed(1)
    _make_guessable(weights, generator)
    # The weights of one more layer, drawn by the demo's own rules.
    extra = dict(model_weights(config | {"num_hidden_layers": 1}, seed=2))
    prefix = f"model.layers.{config['num_hidden_layers']}."
    weights |= {
        name.replace("model.layers.0.", prefix): tensor
        for name, tensor in extra.items()
        if name.startswith("model.layers.0.")
    }
    hidden = config["hidden_size"]
    from_embedding = torch.eye(hidden) * DRAFT_EMBEDDING_SPREAD
    from_state = torch.randn(hidden, hidden, generator=generator) / sqrt(hidden)
    weights |= {
        f"{prefix}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{prefix}enorm.weight": torch.ones(hidden),
        f"{prefix}hnorm.weight": torch.ones(hidden),
        f"{prefix}eh_proj.weight": torch.cat([from_embedding, from_state], dim=1),
        f"{prefix}shared_head.norm.weight": torch.ones(hidden),
        f"{prefix}shared_head.head.weight": weights["lm_head.weight"].clone(),
    }


def _make_guessable(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Give every second token a successor of its own, a cycle away."""
    embedding, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    vocab = len(embedding)
    successor = torch.randperm(vocab, generator=generator)
    for token in range(0, vocab, 2):
        direction = embedding[token] / embedding[token].norm()
        output[successor[token]] += GUESSABLE_PULL * direction
        embedding[token] *= GUESSABLE_SCALE


def v3_config(layers: int) -> dict[str, Any]:
    """Return config.json of a `DeepseekV3ForCausalLM` without experts or draft layers."""
    vocab = build_tokenizer().get_vocab_size()
    return model_config(layers=layers, vocab_size=vocab) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        # The draft layer's index is `layers`; it is dense as well.
        "first_k_dense_replace": layers + 1,
        "num_nextn_predict_layers": 0,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _experts(config: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    yield "gate.weight", torch.randn(EXPERTS, hidden, generator=generator) / sqrt(hidden)
    yield "gate.e_score_correction_bias", torch.zeros(EXPERTS)
    for name in ["shared_experts", *(f"experts.{expert}" for expert in range(EXPERTS))]:
        for part in ("gate_proj", "up_proj"):
            matrix = torch.randn(inner, hidden, generator=generator) / sqrt(hidden)
            yield f"{name}.{part}.weight", matrix
        matrix = torch.randn(hidden, inner, generator=generator)
        yield f"{name}.down_proj.weight", matrix * (MLP_OUTPUT_SPREAD / sqrt(inner))


def write_model(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint with the demo's tokenizer to `directory`, which must not exist yet, and return it."""
    directory.mkdir(parents=True)
    tokenizer = build_tokenizer()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory

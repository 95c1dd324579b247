"""Small checkpoints that only tests need."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvpp_vllm.demo.checkpoint import BOS, EOS, build_tokenizer


def write_dense_checkpoint(directory: Path) -> Path:
    """Write a 2-layer Llama with grouped-query attention, random float32 weights and a tokenizer; return `directory`.

    It is the model that has no MLA. `directory` must not exist yet.
    """
    directory.mkdir(parents=True)
    tokenizer = build_tokenizer()
    config = _dense_config(vocab_size=tokenizer.get_vocab_size())
    save_file(_dense_weights(config), directory / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(names, indent=2) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def _dense_config(*, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def _dense_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return every tensor by its name in `LlamaForCausalLM`: (rows, columns), or ones for a norm."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "model.norm": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / sqrt(shape[-1])
        for name, shape in shapes.items()
    }

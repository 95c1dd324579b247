"""Write a small DeepSeek-V2 checkpoint that real vLLM loads and serves.

The model is dense MLA with random weights and a tokenizer of its own. It knows nothing, but its greedy
tokens depend on the whole history, so a KV cache that is wrong anywhere shows in the text.

Tensor names and shapes follow `DeepseekV2ForCausalLM` of Hugging Face transformers; config fields follow
`DeepseekV2Config`.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from kvpp_dag.errors import ConfigError

MARKER = "kvpp_checkpoint.json"
"""Names the files of a checkpoint written here; a directory without it belongs to somebody else."""

BOS, EOS = "<s>", "</s>"

# Standard deviations of the weights, in units of 1/sqrt(columns). With all of them at 1, attention is close to a
# mean over the history, in which one changed token is lost, and greedy decoding falls into short loops.
# Larger ones make rounding errors grow: with these, float32 stays within 1e-4 of float64 in every logprob.
QUERY_KEY_SPREAD = 1.5
ATTENTION_OUTPUT_SPREAD = 1.5
MLP_OUTPUT_SPREAD = 3.0


class CheckpointDirectoryError(ConfigError):
    """The directory holds files that `write_checkpoint` did not write."""


def write_checkpoint(directory: Path, *, layers: int = 12, seed: int = 0) -> Path:
    """Write config, tokenizer and float32 weights to `directory` and return it.

    The same arguments give the same bytes. A checkpoint written here earlier is replaced; a directory with
    anything else in it is left as it is and raises `CheckpointDirectoryError`.
    """
    if layers < 1:
        raise ValueError(
            f"layers is {layers}, but a checkpoint needs at least 1 layer; pass layers=1 or more."
        )
    _refuse_foreign(directory)
    tokenizer = build_tokenizer()
    config = model_config(layers=layers, vocab_size=tokenizer.get_vocab_size())
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and moved there when complete: an interrupted write leaves no half checkpoint.
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        save_file(
            dict(model_weights(config, seed=seed)), partial / "model.safetensors", {"format": "pt"}
        )
        tokenizer.save(str(partial / "tokenizer.json"))
        _write_json(partial / "tokenizer_config.json", _tokenizer_config(config))
        _write_json(partial / "config.json", config)
        names = sorted([MARKER, *(path.name for path in partial.iterdir())])
        _write_json(partial / MARKER, {"layers": layers, "seed": seed, "files": names})
        partial.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def model_config(*, layers: int, vocab_size: int) -> dict[str, Any]:
    """Return config.json: 4 heads, so TP1, TP2 and TP4 work, and no MoE layer.

    kv_lora_rank 512 and qk_rope_head_dim 64 are the only sizes that vLLM's MLA decode kernel for CPUs accepts.
    The YaRN factor is 1, which leaves every frequency as it is; it is there because vLLM computes YaRN
    in torch on CPUs, while its CPU kernel for plain RoPE misreads MLA's strided queries and keys.
    """
    positions = 2048
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": positions,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def model_weights(config: dict[str, Any], *, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, float32 tensor) of the whole model, drawn in a fixed order from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", torch.randn(vocab, hidden, generator=generator)
    yield "lm_head.weight", _matrix(vocab, hidden, 1.0, generator)
    yield "model.norm.weight", torch.ones(hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, tensor in _layer_weights(config, generator):
            yield f"model.layers.{layer}.{name}", tensor


def _layer_weights(
    config: dict[str, Any], generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden = config["hidden_size"]
    yield "input_layernorm.weight", torch.ones(hidden)
    yield "post_attention_layernorm.weight", torch.ones(hidden)
    yield from _attention_weights(config, generator)
    yield from _dense_mlp_weights(config, generator)


def _attention_weights(
    config: dict[str, Any], generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    shapes = {
        "q_proj": (heads * (nope + rope), hidden, QUERY_KEY_SPREAD),
        "kv_a_proj_with_mqa": (rank + rope, hidden, QUERY_KEY_SPREAD),
        "kv_b_proj": (heads * (nope + value), rank, 1.0),
        "o_proj": (hidden, heads * value, ATTENTION_OUTPUT_SPREAD),
    }
    yield "self_attn.kv_a_layernorm.weight", torch.ones(rank)
    for name, (rows, columns, spread) in shapes.items():
        yield f"self_attn.{name}.weight", _matrix(rows, columns, spread, generator)


def _dense_mlp_weights(
    config: dict[str, Any], generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for name in ("gate_proj", "up_proj"):
        yield f"mlp.{name}.weight", _matrix(inner, hidden, 1.0, generator)
    yield "mlp.down_proj.weight", _matrix(hidden, inner, MLP_OUTPUT_SPREAD, generator)


def _matrix(rows: int, columns: int, spread: float, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator) * (spread / sqrt(columns))


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer of 320 tokens: two marks, newline, printable ASCII and 222 pairs of letters.

    Every id decodes to text of its own, so that texts differ where tokens differ, and any ASCII prompt encodes.
    """
    characters = ["\n", *map(chr, range(32, 127))]
    consonants, vowels = "bcdfghjklmnpqrstvwxyz", "aeiou"
    pairs = [*product(consonants, vowels), *product(vowels, consonants)]
    pairs += [("t", "h"), ("s", "h"), ("c", "h"), ("p", "h"), ("w", "h"), ("c", "k"), ("n", "g")]
    pairs += [("s", "t"), ("t", "r"), ("p", "r"), ("e", "e"), ("o", "o")]
    tokens = [BOS, EOS, *characters, *map("".join, pairs)]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }


def _refuse_foreign(directory: Path) -> None:
    """Raise unless `directory` is absent, empty, or holds exactly the files its marker names."""
    if not directory.exists() and not directory.is_symlink():
        return
    if not directory.is_dir() or directory.is_symlink():
        raise CheckpointDirectoryError(
            f"{directory} is not a directory, but the checkpoint is written as one; give another path."
        )
    found = {path.name for path in directory.iterdir()}
    ours: set[str] = set()
    if MARKER in found:
        ours = set(json.loads((directory / MARKER).read_text())["files"])
    if foreign := sorted(found - ours):
        raise CheckpointDirectoryError(
            f"{directory} holds {', '.join(foreign)}, which this checkpoint writer did not write, and it replaces "
            f"only its own files; give another directory or move those files away."
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

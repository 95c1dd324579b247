"""Configurations of models that the refusal tests ask vLLM about; none of them is ever loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvpp_vllm.demo.engine import environment
from tests.support.models import write_dense_checkpoint
from tests.support.sparse_models import FAMILIES
from tests.support.triton_cpu import model_runner_v2
from tests.support.vllm_cpu import REPOSITORY

SPARSE = {"q_lora_rank": 64, "index_topk": 64, "index_n_heads": 4, "index_head_dim": 128}
DRAFT = {"num_nextn_predict_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "mla": {},
    "sliding": {"sliding_window": 512},
    "hybrid": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "rope_scaling": None,
    },
    "sparse": SPARSE | FAMILIES["deepseek"],
    "sparse mtp": SPARSE | FAMILIES["deepseek"] | DRAFT,
    "glm": SPARSE | FAMILIES["glm"],
    "mtp": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"} | DRAFT,
    "moe": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
    },
}


def write_configs(directory: Path, like: Path) -> None:
    config = json.loads((like / "config.json").read_text())
    for name, changes in CONFIGS.items():
        model = directory / name
        model.mkdir()
        # GLM's rotary settings are of the newer form.
        more = {"rope_parameters": rotary(config), "rope_scaling": None} if name == "glm" else {}
        for tokenizer in like.glob("tokenizer*"):
            shutil.copy(tokenizer, model)
        (model / "config.json").write_text(json.dumps(config | changes | more))


def rotary(config: dict[str, Any]) -> dict[str, Any]:
    return config["rope_scaling"] | {"rope_type": "yarn", "rope_theta": config["rope_theta"]}


def write_ascend(directory: Path, *, settings: str) -> None:
    """A stand-in for vllm-ascend, which cannot be imported without an NPU's runtime."""
    package = directory / "vllm_ascend"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "ascend_config.py").write_text(settings)


def run_refusals(models: Path, checkpoint: Path) -> subprocess.CompletedProcess[str]:
    """Run `tests.vllm.refusals` on models with the tokenizer of `checkpoint`."""
    write_configs(models, checkpoint)
    write_dense_checkpoint(models / "dense")
    write_ascend(models / "ascend", settings="")
    write_ascend(models / "ascend with kvpp", settings='additional_config.get("enable_kvpp", False)')
    # vLLM refuses Model Runner V2 without Triton; the stand-in makes V2 the default.
    (models / "triton").mkdir()
    variables = model_runner_v2(models / "triton")
    paths = (str(REPOSITORY), variables["PYTHONPATH"], os.environ.get("PYTHONPATH"))
    variables |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCH_COMPILE_DISABLE": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    return subprocess.run(
        [sys.executable, "-O", "-m", "tests.vllm.refusals", str(models)],
        cwd=REPOSITORY,
        env=os.environ | environment(ranks=2) | variables,
        capture_output=True,
        text=True,
        timeout=580,
        check=True,
    )

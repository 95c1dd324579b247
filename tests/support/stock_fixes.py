"""Work-arounds for defects of vLLM 0.32 on CPUs that tests meet, with KVPP on and off alike.

They have to act in the worker processes, so they come as a vLLM plugin of the tests' own: `plugin` writes what
`importlib.metadata` needs to find it, for a directory on PYTHONPATH.
"""

import functools
from pathlib import Path
from typing import Any


def plugin(directory: Path) -> Path:
    """Write an entry point of vLLM's plugin group that names `register` into `directory`, and return it."""
    info = directory / "kvpp_stock_fixes-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpp-stock-fixes\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nkvpp_stock_fixes = {__name__}:register\n"
    )
    return directory


def register() -> None:
    """Apply every work-around to the process that loads its plugins."""
    _map_experts()
    _give_stages_their_inputs()


def _map_experts() -> None:
    """Expert parallelism: the CPU's experts take global expert ids for local ones, and read past their weights."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    stock = CPUUnquantizedExperts.apply

    @functools.wraps(stock)
    def apply(self: Any, **arguments: Any) -> None:
        expert_map = arguments["expert_map"]
        if expert_map is not None:
            local = expert_map[arguments["topk_ids"].long()]
            here = local >= 0
            arguments["topk_ids"] = local.clamp(min=0).to(arguments["topk_ids"].dtype)
            arguments["topk_weights"] = arguments["topk_weights"] * here
        stock(self, **arguments)

    CPUUnquantizedExperts.apply = apply


def _give_stages_their_inputs() -> None:
    """Pipeline parallelism: later stages get their input buffers in a warm-up, which eager engines skip."""
    from vllm.distributed.parallel_state import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    stock = CPUModelRunner.load_model

    @functools.wraps(stock)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )

    CPUModelRunner.load_model = load_model

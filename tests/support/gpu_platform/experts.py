"""Experts on the test device: one kernel of the current stream, in torch. vLLM leaves them to a foreign platform."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from tests.support.gpu_platform.kernels import launch


def register() -> None:
    """Let vLLM take the experts below for every layer of experts."""
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda moe_config: (
        UnquantizedMoeBackend.CPU,
        Experts,
    )


class Experts(CPUUnquantizedExperts):
    """Gated experts with weights as the checkpoint has them, those of this rank only."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as they are."""

    def apply(
        self,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        global_num_experts: int,
        expert_map: Any,
        *_: Any,
        **__: Any,
    ) -> None:
        """Write (tokens, hidden): of the experts that each token was sent to, the weighted sum of those here."""
        launch(_experts, output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map)


def _experts(output: Any, hidden: Any, w1: Any, w2: Any, weights: Any, chosen: Any, local: Any) -> None:
    output.zero_()
    chosen = chosen.long() if local is None else local[chosen.long()].long()  # -1: on another rank
    for expert in range(len(w1)):
        token, place = torch.where(chosen == expert)
        gate, up = (hidden[token] @ w1[expert].T).chunk(2, dim=-1)
        found = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        output.index_add_(0, token, found * weights[token, place, None].to(found.dtype))

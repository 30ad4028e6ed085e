"""The second half of a decoder layer: one network for every token, or a choice of experts.

Where it stands: `transformer.py` builds one for each layer with `build_feed_forward`.

    GatedMLP           down(silu(gate(x)) * up(x))           Llama and most others; gate and up are one matrix
    MLP                down(gelu(up(x)))                     GPT-2, GPT-NeoX, StarCoder2
    MixtureOfExperts   sum over k of weight * expert(x)      Mixtral, Qwen-MoE, OLMoE; each expert is a GatedMLP

What always holds: each token is treated by itself; which others share its step changes nothing.

In vLLM: `vllm/model_executor/layers/fused_moe/` and the `MLP` classes of each model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mini_vllm.model.activations import build_activation, build_gated_activation
from mini_vllm.model.config import ExpertsConfig, ModelConfig
from mini_vllm.model.layers import Linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with gate and up in one matrix: [.., hidden] -> [.., hidden]."""

    def __init__(self, config: ModelConfig, inner: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, device=device)
        self.activation = build_gated_activation(config.activation)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return output


class MLP(nn.Module):
    """down(activation(up(x))): [.., hidden] -> [.., hidden]."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up_proj = Linear(hidden, inner, bias=bias, dtype=dtype, device=device)
        self.activation = build_activation(config.activation)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.up_proj(hidden)))
        return output


class SharedExpert(nn.Module):
    """A network that every token uses beside its chosen ones, weighed by a gate: sigmoid(gate(x)) * mlp(x)."""

    def __init__(self, config: ModelConfig, inner: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate = Linear(config.hidden_size, 1, dtype=dtype, device=device)
        self.sigmoid = nn.Sigmoid()
        self.mlp = GatedMLP(config, inner, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.sigmoid(self.gate(hidden)) * self.mlp(hidden)
        return output


class MixtureOfExperts(nn.Module):
    """Each token goes through the `experts_per_token` networks that the router rates highest for it.

    The pairs of a token and one of its experts are sorted by expert, so that each expert multiplies all of its tokens
    at once. Three tokens, two experts each::

        chosen   token 0: 2 0    token 1: 0 3    token 2: 2 0
        pairs    0    1    2    3    4    5                     pair p belongs to token p // 2
        expert   2    0    0    3    2    0
        sorted   1    2    5  |  0    4  |  3                   expert 0: tokens 0 1 2, expert 2: tokens 0 2, ...

    The parts of a token's sum are added in the order of the experts, whatever other tokens there are.
    """

    def __init__(
        self, config: ModelConfig, experts: ExpertsConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.experts_per_token, self.normalize = experts.experts_per_token, experts.normalize
        self.router = Linear(config.hidden_size, experts.num_experts, dtype=dtype, device=device)
        self.experts = nn.ModuleList(
            GatedMLP(config, experts.intermediate_size, dtype=dtype, device=device) for _ in range(experts.num_experts)
        )
        self.shared_expert: SharedExpert | None = None
        if experts.shared_intermediate_size:
            self.shared_expert = SharedExpert(config, experts.shared_intermediate_size, dtype=dtype, device=device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        weights, chosen = self._route(hidden)
        pairs = chosen.flatten().argsort(stable=True)  # [T * experts_per_token], grouped by expert
        tokens = pairs // self.experts_per_token
        weights = weights.flatten()[pairs, None]
        inputs = hidden[tokens]
        output = torch.zeros_like(hidden)
        start = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=len(self.experts)).tolist()):
            if count:
                rows = slice(start, start + count)
                output.index_add_(0, tokens[rows], self.experts[expert](inputs[rows]) * weights[rows])
                start += count
        return output if self.shared_expert is None else output + self.shared_expert(hidden)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in the model's dtype and expert numbers, [T, experts_per_token] each."""
        probabilities = self.router(hidden).softmax(dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(hidden.dtype), chosen


def build_feed_forward(config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The feed-forward part of one layer."""
    if config.experts is not None and layer in config.experts.layers:
        return MixtureOfExperts(config, config.experts, dtype=dtype, device=device)
    if config.gated_mlp:
        return GatedMLP(config, config.intermediate_size, dtype=dtype, device=device)
    return MLP(config, dtype=dtype, device=device)

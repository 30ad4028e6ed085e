"""Activations of the feed-forward network, by name; `SiluAndMul`, which most models use, is in `layers.py`.

Where it stands: `feed_forward.py` builds one for each network.

In vLLM: `vllm/model_executor/layers/activation.py`.
"""

from __future__ import annotations

from torch import Tensor, nn

from mini_vllm.model.config import Activation
from mini_vllm.model.layers import SiluAndMul


class ActivateAndMul(nn.Module):
    """[..., 2 * width], gate beside up -> activation(gate) * up."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated: Tensor = self.activation(gate)
        return activated * up


def build_activation(name: Activation) -> nn.Module:
    """An activation from tensor to tensor of the same shape."""
    if name == "silu":
        return nn.SiLU()
    if name == "relu":
        return nn.ReLU()
    return nn.GELU(approximate="tanh" if name == "gelu_tanh" else "none")


def build_gated_activation(name: Activation) -> nn.Module:
    """An activation that takes gate and up side by side."""
    return SiluAndMul() if name == "silu" else ActivateAndMul(build_activation(name))

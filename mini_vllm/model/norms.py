"""The norms that families differ in; `RMSNorm` itself, which most of them use, is in `layers.py`.

Where it stands: `transformer.py` builds all norms of a model with `build_norm`, by what the configuration says.

What always holds: means are taken in float32 whatever the model's dtype.

In vLLM: `vllm/model_executor/layers/layernorm.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mini_vllm.model.config import ModelConfig
from mini_vllm.model.layers import RMSNorm, weight


class WideRMSNorm(nn.Module):
    """RMSNorm that is rounded to the model's dtype once, after the weight was multiplied in float32.

    Args:
        width: of the last dimension.
        eps: added to the mean square.
        offset: the weight counts from here. Gemma's weights are kept as their distance from 1, where bfloat16 is finer.
        dtype, device: of the weight.
    """

    def __init__(self, width: int, eps: float, *, offset: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = weight(width, dtype=dtype, device=device)
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * (self.offset + self.weight.to(torch.float32))).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    Args:
        shape: of the weight: (width,), or (heads, width) for a weight of its own for each head.
        eps: added to the variance.
        bias: whether there is one.
        dtype, device: of weight and bias.
    """

    def __init__(
        self, shape: tuple[int, ...], eps: float, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = weight(*shape, dtype=dtype, device=device)
        self.bias = weight(*shape, dtype=dtype, device=device) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.layer_norm(x.to(torch.float32), x.shape[-1:], eps=self.eps)
        wide = wide * self.weight.to(torch.float32)
        if self.bias is not None:
            wide = wide + self.bias.to(torch.float32)
        return wide.to(x.dtype)


class AcrossHeads(nn.Module):
    """Applies a norm to all heads of a token together: [T, heads, head_dim] as [T, heads * head_dim]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, heads: Tensor) -> Tensor:
        normed: Tensor = self.norm(heads.flatten(start_dim=1))
        return normed.view(heads.shape)


def build_norm(config: ModelConfig, *shape: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A norm of the configuration's kind.

    Args:
        config: the model.
        shape: of the weight; the norm is taken over the last of these dimensions.
        dtype, device: of the weight.
    """
    if config.norm == "layer":
        return LayerNorm(shape, config.norm_eps, bias=config.norm_bias, dtype=dtype, device=device)
    if config.norm == "rms":
        return RMSNorm(shape[-1], config.norm_eps, dtype=dtype, device=device)
    offset = 1.0 if config.norm == "rms_plus_one" else 0.0
    return WideRMSNorm(shape[-1], config.norm_eps, offset=offset, dtype=dtype, device=device)


def build_head_norm(config: ModelConfig, num_heads: int, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The norm of queries or keys [T, num_heads, head_dim] before the rotary embedding."""
    if config.qk_norm is None:
        return nn.Identity()
    if config.qk_norm == "width":
        return AcrossHeads(build_norm(config, num_heads * config.head_dim, dtype=dtype, device=device))
    if config.qk_norm == "each_head":
        return build_norm(config, num_heads, config.head_dim, dtype=dtype, device=device)
    return build_norm(config, config.head_dim, dtype=dtype, device=device)

"""The small pieces that a decoder layer is made of, in plain PyTorch.

Where it stands: `transformer.py` puts these together; nothing here knows of attention, caches or requests.

What always holds: each piece that computes is a module of its own with a `forward` from tensors to tensors. A faster
twin (a packed linear layer, a fused norm) takes a piece's place in the module tree, and the text of the transformer
stays as it is. Weights never need gradients.

In vLLM: `vllm/model_executor/layers/` (`linear.py`, `layernorm.py`, `activation.py`, `vocab_parallel_embedding.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Room for a weight; its values come from the loader."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b, for x [..., in_features].

    Args:
        in_features, out_features: widths; the weight is [out_features, in_features].
        bias: whether there is a bias [out_features].
        dtype, device: of the weights.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features, dtype=dtype, device=device)
        self.bias = weight(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """One row of [vocab_size, hidden_size] for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = weight(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)


class TiedHead(nn.Module):
    """The output layer of a model whose embedding matrix is its head as well: y = x E^T, without weights of its own."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that the weight is not registered twice

    @property
    def weight(self) -> Tensor:
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    The mean is taken in float32 whatever the model's dtype; the result is rounded to that dtype before the weight is
    multiplied, as the models were trained.
    """

    def __init__(self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = weight(width, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class SiluAndMul(nn.Module):
    """SwiGLU's gate (Shazeer 2020, arXiv:2002.05202): [..., 2 * width], gate beside up -> silu(gate) * up."""

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class Scale(nn.Module):
    """x times a number that belongs to the model."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class SoftCap(nn.Module):
    """c tanh(x / c): close to x while that is small, and never beyond c."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)

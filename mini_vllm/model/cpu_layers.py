"""The fast twins of `layers.py` on a processor, and the function that puts them in place.

Where it stands: after loading, `use_cpu_kernels` walks the module tree and swaps what it has a twin for. The text of
the transformer stays as it is, and whatever has no twin runs as plain PyTorch beside them.

    Linear, TiedHead   PackedLinear, PackedHead     weights in the order in which they are read
    RMSNorm            FastRMSNorm                  one pass, rounded as in the reference
    ApplyRotary        FastApplyRotary              in place
    SiluAndMul         FastSiluAndMul
    SiLU, GELU ...     FastActivation

What always holds: a twin gives a token the same bits in every batch. Against its reference it differs by the rounding
of float32 sums.

In vLLM: `vllm/model_executor/layers/` (each layer's `forward_cpu`), `vllm/model_executor/layers/utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mini_vllm.kernels.cpu import ops
from mini_vllm.model.allocation import large_blocks_apart
from mini_vllm.model.layers import Linear, RMSNorm, SiluAndMul, TiedHead
from mini_vllm.model.onednn_linear import OneDnnHead, OneDnnLinear, prefers_onednn
from mini_vllm.model.rotary import ApplyRotary


class PackedLinear(nn.Module):
    """Twin of `Linear`: x [..., in_features] -> [..., out_features]."""

    def __init__(self, twin: Linear) -> None:
        super().__init__()
        self.packed = ops.pack_linear(twin.weight.contiguous())
        self.bias = twin.bias
        self.out_features = twin.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return ops.linear(x, self.packed, self.out_features, self.bias)
        rows = ops.linear(x.flatten(end_dim=-2), self.packed, self.out_features, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


class PackedHead(nn.Module):
    """Twin of the output layer: [R, hidden_size] -> [R, vocab_size] in float32, not rounded to the model's dtype."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.packed = ops.pack_linear(weight.contiguous())
        self.out_features = weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.packed, self.out_features, float32_output=True)


class FastRMSNorm(nn.Module):
    """Twin of `RMSNorm`."""

    def __init__(self, twin: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = twin.weight, twin.eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class FastApplyRotary(nn.Module):
    """Twin of `ApplyRotary`. It turns what it is given, which is the projection's own output or a norm's."""

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ops.rotate_(query, cos, sin)
        ops.rotate_(key, cos, sin)
        return query, key


class FastSiluAndMul(nn.Module):
    """Twin of `SiluAndMul`."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return ops.silu_and_mul(gate_up)


class FastActivation(nn.Module):
    """Twin of SiLU, of GELU by tanh and of the sigmoid: PyTorch's own have other bits at the end of a tensor."""

    def __init__(self, name: ops.ActivationName) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return ops.activate(x, self.name)


def use_cpu_kernels(model: nn.Module) -> None:
    """Swap every module that has a twin, anywhere in the tree. The weights that were packed are let go.

    Args:
        model: in float32 or bfloat16, on the CPU, `build.load_kernels` called before.
    """
    with large_blocks_apart():
        _swap_children(model)


def _swap_children(model: nn.Module) -> None:
    for name, child in list(model.named_children()):
        twin = _twin_of(name, child)
        if twin is not None:
            setattr(model, name, twin)
        else:
            _swap_children(child)


def _twin_of(name: str, module: nn.Module) -> nn.Module | None:
    # Exact types: a subclass computes something else.
    if type(module) in (Linear, TiedHead):
        weight: Tensor = module.weight  # type: ignore[assignment]
        onednn = weight.dtype == torch.bfloat16 and prefers_onednn()
        if weight.shape[1] % 2:  # an odd width has no pairs
            return None
        if name == "lm_head" and getattr(module, "bias", None) is None:
            return OneDnnHead(weight) if onednn else PackedHead(weight)
        if isinstance(module, Linear):
            return OneDnnLinear(module) if onednn else PackedLinear(module)
    simple: dict[type, Callable[[], nn.Module]] = {
        RMSNorm: lambda: FastRMSNorm(module),  # type: ignore[arg-type]
        ApplyRotary: FastApplyRotary,
        SiluAndMul: FastSiluAndMul,
        nn.SiLU: lambda: FastActivation("silu"),
        nn.Sigmoid: lambda: FastActivation("sigmoid"),
    }
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return FastActivation("gelu_tanh")
    return simple[type(module)]() if type(module) in simple else None

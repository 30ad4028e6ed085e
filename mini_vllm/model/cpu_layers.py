"""The fast twins of `layers.py` on a processor, and the function that puts them in place.

Where it stands: after loading, `use_cpu_kernels` walks the module tree and swaps what it has a twin for. The text of
the transformer stays as it is, and whatever has no twin runs as plain PyTorch beside them.

    Linear, TiedHead   PackedLinear, PackedHead     weights in the order in which they are read
    RMSNorm            FastRMSNorm                  one pass, rounded as in the reference
    ApplyRotary        FastApplyRotary              in place
    SiluAndMul         FastSiluAndMul
    SiLU, GELU ...     FastActivation
    DecoderLayer       FastDecoderLayer             of these pieces, where a layer is put together as in Llama

What always holds: a twin gives a token the same bits in every batch. Against its reference it differs by the rounding
of float32 sums.

In vLLM: `vllm/model_executor/layers/` (each layer's `forward_cpu`), `vllm/model_executor/layers/utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mini_vllm.kernels.cpu import ops
from mini_vllm.model.allocation import large_blocks_apart
from mini_vllm.model.attention import StepAttention
from mini_vllm.model.feed_forward import GatedMLP
from mini_vllm.model.layers import Linear, RMSNorm, SiluAndMul, TiedHead
from mini_vllm.model.onednn_linear import OneDnnHead, OneDnnLinear, prefers_onednn
from mini_vllm.model.rotary import ApplyRotary
from mini_vllm.model.transformer import DecoderLayer


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


class FastDecoderLayer(nn.Module):
    """Twin of a `DecoderLayer` that is put together in the way of Llama: two calls beside attention instead of eleven.

    Args:
        twin: the layer, its parts swapped already; see `fits`.
    """

    def __init__(self, twin: Any) -> None:
        super().__init__()
        attention, mlp = twin.attention, twin.mlp
        self.layer = attention.layer
        input_norm, norm = twin.input_norm, twin.post_attention_norm
        qkv, output, gate_up, down = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        self.weights = ops.LayerWeights(
            input_norm=input_norm.weight,
            post_attention_norm=norm.weight,
            eps=norm.eps,
            qkv=qkv.packed,
            qkv_bias=qkv.bias,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            output=output.packed,
            output_bias=output.bias,
            gate_up=gate_up.packed,
            gate_up_bias=gate_up.bias,
            down=down.packed,
            down_bias=down.bias,
        )

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Whether a layer is of that kind: pre-norm, its projections packed, SwiGLU, nothing between."""
        if type(layer) is not DecoderLayer or type(layer.mlp) is not GatedMLP:
            return False
        attention, mlp = layer.attention, layer.mlp
        expected: list[tuple[nn.Module, type]] = [
            *((norm, FastRMSNorm) for norm in (layer.input_norm, layer.post_attention_norm)),
            *((linear, PackedLinear) for linear in (attention.qkv_proj, attention.o_proj)),
            *((linear, PackedLinear) for linear in (mlp.gate_up_proj, mlp.down_proj)),
            *((nothing, nn.Identity) for nothing in (attention.q_norm, attention.k_norm)),
            *((nothing, nn.Identity) for nothing in (layer.attention_output, layer.mlp_output)),
            (attention.apply_rotary, FastApplyRotary),
            (mlp.activation, FastSiluAndMul),
        ]
        return all(type(module) is kind for module, kind in expected)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        query, key, value = ops.before_attention(hidden, self.weights, cos, sin)
        return ops.after_attention(attention(self.layer, query, key, value), hidden, self.weights)


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
        if twin is None:
            _swap_children(child)
            twin = FastDecoderLayer(child) if FastDecoderLayer.fits(child) else None
        if twin is not None:
            setattr(model, name, twin)


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

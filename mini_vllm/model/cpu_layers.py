"""The fast twins of `layers.py` on a processor, and the function that puts them in place.

Where it stands: after loading, `use_cpu_kernels` walks the module tree and swaps what it has a twin for. The text of
the transformer stays as it is, and whatever has no twin runs as plain PyTorch beside them.

    Linear, TiedHead   PackedLinear, PackedHead     weights in the order in which they are read
    RMSNorm            FastRMSNorm                  one pass, rounded as in the reference
    ApplyRotary        FastApplyRotary              in place
    SiluAndMul         FastSiluAndMul
    SiLU, GELU ...     FastActivation
    DecoderLayer ...   FastDecoderLayers            a run of layers that are put together as in Llama, in one call

What always holds: a twin gives a token the same bits in every batch. Against its reference it differs by the rounding
of float32 sums.

In vLLM: `vllm/model_executor/layers/` (each layer's `forward_cpu`), `vllm/model_executor/layers/utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from mini_vllm.kernels.cpu import ops
from mini_vllm.model.allocation import WeightMemory, large_blocks_apart
from mini_vllm.model.attention import StepAttention
from mini_vllm.model.attention_backends.paged_cpu import PagedCpuAttention
from mini_vllm.model.feed_forward import GatedMLP
from mini_vllm.model.head_screen import make_screen
from mini_vllm.model.layers import Linear, RMSNorm, SiluAndMul, TiedHead
from mini_vllm.model.onednn_linear import OneDnnHead, OneDnnLinear, prefers_onednn
from mini_vllm.model.rotary import ApplyRotary
from mini_vllm.model.transformer import DecoderLayer, Transformer


class PackedLinear(nn.Module):
    """Twin of `Linear`: x [..., in_features] -> [..., out_features]."""

    def __init__(self, twin: Linear, memory: ops.Memory = torch.empty) -> None:
        super().__init__()
        self.packed = ops.pack_linear(twin.weight.contiguous(), memory)
        self.bias = twin.bias
        self.out_features = twin.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return ops.linear(x, self.packed, self.out_features, self.bias)
        rows = ops.linear(x.flatten(end_dim=-2), self.packed, self.out_features, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)


class PackedHead(nn.Module):
    """Twin of the output layer: [R, hidden_size] -> [R, vocab_size] in float32, not rounded to the model's dtype.

    With a screen (head_screen.py) where the processor multiplies bytes: it then `FindsBestTokens`.
    """

    def __init__(self, weight: Tensor, memory: ops.Memory = torch.empty) -> None:
        super().__init__()
        self.packed = ops.pack_linear(weight.contiguous(), memory)
        self.screen = make_screen(weight, memory) if ops.multiplies_bytes() else None
        self.out_features = weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.packed, self.out_features, float32_output=True)

    def best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self.screen is None else self.screen.best_outputs(hidden, self.packed)


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


class FastDecoderLayers(nn.Module):
    """Twin of some consecutive `DecoderLayer`s: one call instead of thirteen for each.

    Where attention is not the C++ one, which that call includes, the layers run one by one.

    Args:
        layers: alike and put together in the way of Llama (see `shape_of`), their parts swapped already.
    """

    def __init__(self, layers: list[DecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        modules: list[Any] = layers
        self.first = modules[0].attention.layer
        matrices = [
            matrix
            for layer in modules
            for matrix in (
                layer.attention.qkv_proj,
                layer.attention.o_proj,
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            )
        ]
        tensors: list[Tensor] = []
        for i, layer in enumerate(modules):
            packed = [matrix.packed for matrix in matrices[4 * i : 4 * i + 4]]
            tensors += [layer.input_norm.weight, layer.post_attention_norm.weight, *packed]
        self.weights = ops.DecoderWeights(
            num_heads=modules[0].attention.num_heads,
            num_kv_heads=modules[0].attention.num_kv_heads,
            eps=modules[0].input_norm.eps,
            tensors=tensors,
            biases=[matrix.bias for matrix in matrices],
        )

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: StepAttention) -> Tensor:
        if isinstance(attention, PagedCpuAttention):
            return ops.decoder_layers(hidden, self.weights, cos, sin, attention.caches(self.first, len(self.layers)))
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attention)
        return hidden


def shape_of(layer: nn.Module) -> tuple[object, ...] | None:
    """What layers of one run have in common; None for a layer that cannot be part of a run.

    It must be pre-norm, its projections packed, SwiGLU of a width that makes whole panels, and nothing between.
    """
    if type(layer) is not DecoderLayer or type(layer.mlp) is not GatedMLP:
        return None
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
    if not all(type(module) is kind for module, kind in expected):
        return None
    parts: Any = layer
    shapes = [linear.packed.shape for linear in (parts.attention.o_proj, parts.mlp.down_proj)]
    if shapes[1][1] % ops.PANEL or parts.input_norm.eps != parts.post_attention_norm.eps:
        return None
    return (*shapes, parts.input_norm.eps, parts.attention.num_heads, parts.attention.num_kv_heads)


def use_cpu_kernels(model: nn.Module) -> None:
    """Swap every module that has a twin, anywhere in the tree. The weights that were packed are let go.

    Args:
        model: in float32 or bfloat16, on the CPU, `build.load_kernels` called before.
    """
    with large_blocks_apart():
        _swap_children(model, WeightMemory())
    if isinstance(model, Transformer):
        _join_layers(model)


def _swap_children(model: nn.Module, memory: WeightMemory) -> None:
    for name, child in list(model.named_children()):
        twin = _twin_of(name, child, memory)
        if twin is None:
            _swap_children(child, memory)
        else:
            setattr(model, name, twin)


def _join_layers(model: Transformer) -> None:
    """Put one module in the place of each run of layers that are alike and turn by the same angles."""
    joined: list[nn.Module] = []
    rotaries: list[int] = []
    pairs = zip(model.layers, model.rotary_of_layer, strict=True)
    for (shape, rotary), run in groupby(pairs, key=lambda pair: (shape_of(pair[0]), pair[1])):
        layers: list[Any] = [layer for layer, _ in run]
        new = layers if shape is None else [FastDecoderLayers(layers)]
        joined += new
        rotaries += [rotary] * len(new)
    model.layers, model.rotary_of_layer = nn.ModuleList(joined), rotaries


def _twin_of(name: str, module: nn.Module, memory: WeightMemory) -> nn.Module | None:
    # Exact types: a subclass computes something else.
    if type(module) in (Linear, TiedHead):
        weight: Tensor = module.weight  # type: ignore[assignment]
        onednn = weight.dtype == torch.bfloat16 and prefers_onednn()
        if weight.shape[1] % 2:  # an odd width has no pairs
            return None
        if name == "lm_head" and getattr(module, "bias", None) is None:
            return OneDnnHead(weight) if onednn else PackedHead(weight, memory)
        if isinstance(module, Linear):
            return OneDnnLinear(module) if onednn else PackedLinear(module, memory)
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

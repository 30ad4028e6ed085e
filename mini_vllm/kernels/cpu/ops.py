"""The kernels as typed functions. `build.load_kernels` comes first; each function names its twin.

Where it stands: the model's fast modules and the attention backend call these; the C++ behind them is in `csrc/`.

What always holds: float32 and bfloat16 only, every tensor on the CPU. A row of a result depends on that row alone, so
it has the same bits in every batch.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

ActivationName = Literal["silu", "gelu_tanh", "sigmoid"]  # in the order of the C++ enumeration


def pack_linear(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> the order in which `linear` reads it. `inputs` must be even."""
    packed: Tensor = torch.ops.mini_vllm_cpu.pack_linear.default(weight)
    return packed


def linear(
    x: Tensor,
    packed: Tensor,
    outputs: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    float32_output: bool = False,
) -> Tensor:
    """x W^T + bias + residual, summed in float32 and rounded once. Twin: `torch.nn.functional.linear`.

    Args:
        x: [rows, inputs].
        packed: from `pack_linear`.
        outputs: rows of the weight that was packed.
        bias: [outputs]. residual: [rows, outputs].
        float32_output: leave the result unrounded, for logits.
    """
    y: Tensor = torch.ops.mini_vllm_cpu.linear.default(x, packed, outputs, bias, residual, float32_output)
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin: `mini_vllm.model.norms.RMSNorm`. x: [..., width], weight: [width]."""
    y: Tensor = torch.ops.mini_vllm_cpu.rms_norm.default(x, weight, eps)
    return y


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """In place. heads: [T, heads, head_dim], cos and sin: [T, 1, head_dim / 2]. Twin: `ApplyRotary`."""
    torch.ops.mini_vllm_cpu.rotate.default(heads, cos, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * width] -> [rows, width]. Twin: `SiluAndMul`."""
    y: Tensor = torch.ops.mini_vllm_cpu.silu_and_mul.default(gate_up)
    return y


def activate(x: Tensor, name: ActivationName) -> Tensor:
    """[rows, width], rows at any distance -> the same shape. Twin: `torch.nn.functional`'s function of that name."""
    y: Tensor = torch.ops.mini_vllm_cpu.activate.default(x, get_args(ActivationName).index(name))
    return y


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Write the new keys and values, then attend. Twin: the `reference` attention backend.

    Args:
        query: [T, num_heads, head_dim]. key, value: [T, num_kv_heads, head_dim].
        key_cache, value_cache: [blocks, num_kv_heads, ...], see `attention.h`; changed.
        block_tables, query_starts, context_lens, slot_mapping: of `AttentionMetadata`.
        block_size: tokens in a block.
        scale, softcap, window: of `AttentionLayerSpec`.
    """
    output: Tensor = torch.ops.mini_vllm_cpu.paged_attention.default(
        query, key, value, key_cache, value_cache, block_tables, query_starts, context_lens, slot_mapping,
        block_size, scale, softcap or 0.0, window or 0,
    )  # fmt: skip
    return output


def padded_head_dim(head_dim: int) -> int:
    """Heads are stored with zeros up to a multiple of sixteen lanes."""
    return -(-head_dim // 16) * 16

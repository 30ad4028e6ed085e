"""The kernels as typed functions. `build.load_kernels` comes first; each function names its twin.

Where it stands: the model's fast modules and the attention backend call these; the C++ behind them is in `csrc/`.

What always holds: float32 and bfloat16 only, every tensor on the CPU. A row of a result depends on that row alone, so
it has the same bits in every batch.

In vLLM: `vllm/_custom_ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

PANEL = 32  # outputs that lie together in a packed matrix
ActivationName = Literal["silu", "gelu_tanh", "sigmoid"]  # in the order of the C++ enumeration


class Memory(Protocol):
    """Who gives memory: torch.empty, or a place where weights lie together."""

    def __call__(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> Tensor: ...


def pack_linear(weight: Tensor, memory: Memory = torch.empty) -> Tensor:
    """[outputs, inputs] -> the order in which `linear` reads it, [panels, inputs, PANEL]. `inputs` must be even."""
    outputs, inputs = weight.shape
    packed = memory((-(-outputs // PANEL), inputs, PANEL), dtype=weight.dtype)
    torch.ops.mini_vllm_cpu.pack_linear.default(weight, packed)
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


@dataclass(frozen=True)
class ScreenWeights:
    """A matrix in bytes beside the packed one, for `best_outputs`. Outputs that fill up the last panel are all 0.

    Args:
        codes: [panels, inputs, PANEL] int8, from `pack_bytes`.
        scales: [outputs of all panels] float32; output j of the turned matrix is about scales[j] times its codes.
        norms: [outputs of all panels] float32, the lengths of the rows of codes.
        zeros: [outputs of all panels] int32, -128 times the sums of the rows of codes.
        error: how far an output is from its codes at the most, in lengths of its scale.
        lost: what rounding may move a product by, in parts of the lengths of its two vectors.
        left, right: the rotation, [a, a] and [b, b] float32 with a * b inputs: a row, read as [a, b], becomes
            left row right.
    """

    codes: Tensor
    scales: Tensor
    norms: Tensor
    zeros: Tensor
    error: float
    lost: float
    left: Tensor
    right: Tensor


def multiplies_bytes() -> bool:
    """Whether the processor has instructions for products of bytes; without, `best_outputs` is right but slow."""
    return bool(torch.ops.mini_vllm_cpu.multiplies_bytes.default())


def pack_bytes(codes: Tensor, packed: Tensor) -> None:
    """[outputs, inputs] int8 -> `packed`, in the order of `pack_linear`. `inputs` must be a multiple of 4."""
    torch.ops.mini_vllm_cpu.pack_bytes.default(codes, packed)


def best_outputs(x: Tensor, packed: Tensor, outputs: int, screen: ScreenWeights) -> tuple[Tensor, Tensor] | None:
    """The greatest number of each row of x W^T and its first place; None where only the whole product can tell.

    Twin: `linear` and then `best_tokens`, with the same bits.

    Args:
        x: [rows, inputs], contiguous.
        packed: from `pack_linear`.
        outputs: rows of the weight that was packed.
        screen: of the same weight.
    """
    s = screen
    values, places, is_found = torch.ops.mini_vllm_cpu.best_outputs.default(
        x, packed, outputs, s.codes, s.scales, s.norms, s.zeros, s.error, s.lost, s.left, s.right
    )
    return (values, places) if is_found else None


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


@dataclass(frozen=True)
class DecoderWeights:
    """A run of decoder layers in the way of Llama that are alike in shape.

    Args:
        num_heads, num_kv_heads: what qkv makes, in this order: query heads, key heads, value heads.
        eps: of all norms.
        tensors: six a layer: input norm and post-attention norm [hidden]; qkv, output, gate_up and down from
            `pack_linear`. The width between gate_up and down must be a multiple of 32.
        biases: four a layer, of the matrices; None where there is none.
    """

    num_heads: int
    num_kv_heads: int
    eps: float
    tensors: list[Tensor]
    biases: list[Tensor | None]


@dataclass(frozen=True)
class StepCaches:
    """Keys and values of some layers, and where a step's tokens are in them.

    Args:
        keys, values: one a layer, see `attention.h`; changed.
        block_tables, query_starts, context_lens, slot_mapping: of `AttentionMetadata`.
        block_size: tokens in a block.
        scale, softcap: of `AttentionLayerSpec`, the same in all layers. windows: one a layer.
        only_last_tokens: behind these layers nothing is read but the last token of each sequence.
    """

    keys: list[Tensor]
    values: list[Tensor]
    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    slot_mapping: Tensor
    block_size: int
    scale: float
    softcap: float | None
    windows: list[int | None]
    only_last_tokens: bool


def decoder_layers(hidden: Tensor, weights: DecoderWeights, cos: Tensor, sin: Tensor, caches: StepCaches) -> Tensor:
    """Some layers, from beginning to end: `rms_norm`, `linear`, `rotate_`, `paged_attention`, `silu_and_mul`, in a row.

    Twin: `DecoderLayer`, called one after the other.

    Args:
        hidden: [T, hidden].
        weights: of the layers.
        cos, sin: [T, 1, head_dim / 2].
        caches: of the same layers.
    """
    w, c = weights, caches
    result: Tensor = torch.ops.mini_vllm_cpu.decoder_layers.default(
        *(hidden, w.tensors, w.biases, w.eps, w.num_heads, w.num_kv_heads, cos, sin, c.keys, c.values, c.block_tables),
        *(c.query_starts, c.context_lens, c.slot_mapping, c.block_size, c.scale, c.softcap or 0.0),
        [window or 0 for window in c.windows],
        c.only_last_tokens,
    )
    return result


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest logit of each row and its first token. Twin: `Tensor.max(dim=1)`."""
    values, token_ids = torch.ops.mini_vllm_cpu.best_tokens.default(logits)
    return values, token_ids


def draw_tokens(
    logits: Tensor,
    numbers: Tensor,
    integers: Tensor,
    grammar_mask: Tensor | None,
    allowed: tuple[Tensor | None, Tensor | None],
    forbidden: tuple[Tensor | None, Tensor | None],
    bias: tuple[Tensor | None, Tensor | None, Tensor | None],
    history: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Twin: `mini_vllm.model.sampler.draw_worked`.

    Args:
        logits: [R, vocabulary] float32.
        numbers: [6, W] float32: temperature, top_p, min_p, repetition, presence and frequency penalty.
        integers: [5, W] int64: row of the logits, top_k, seed, sample index, position.
        grammar_mask: [W, words] int32.
        allowed, forbidden: (draws, token ids), sorted by draw. bias: and what is added to the logits.
        history: draws with penalties, sorted; their prompt tokens and output tokens, padded.
    """
    token_ids, has_no_token = torch.ops.mini_vllm_cpu.draw_tokens.default(
        logits, numbers, integers, grammar_mask, *allowed, *forbidden, *bias, *history
    )
    return token_ids, has_no_token


def logprobs(logits: Tensor, rows: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Twin: `mini_vllm.model.sampler.logprobs_of_rows`; the fields of a `LogprobsOutput`."""
    values, top_token_ids, top_values = torch.ops.mini_vllm_cpu.logprobs.default(logits, rows, targets, k)
    return values, top_token_ids, top_values


def padded_head_dim(head_dim: int) -> int:
    """Heads are stored with zeros up to a multiple of sixteen lanes."""
    return -(-head_dim // 16) * 16

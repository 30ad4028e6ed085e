"""Attention of one sequence over keys that lie side by side: what every plain backend is made of.

Where it stands: `recompute` and `contiguous` use it for everything, `paged_reference` for prefills.

In vLLM: the varlen calls into FlashAttention in `vllm/v1/attention/backends/flash_attn.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mini_vllm.model.attention import AttentionLayerSpec

QUERIES_IN_A_PIECE = 256  # bounds the mask to 256 x context; there is never one of length x length


def attend_one_sequence(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayerSpec) -> Tensor:
    """Causal attention of the last Q tokens of a sequence over its K tokens.

    Positions count from the end, so query i is token K - Q + i; keys that no query can see may be left out in front.

    Args:
        query: [Q, num_heads, head_dim].
        key, value: [K, num_kv_heads, head_dim], K >= Q.

    Returns:
        [Q, num_heads, head_dim].
    """
    num_queries, num_keys = query.shape[0], key.shape[0]
    window = layer.sliding_window or num_keys
    if num_queries == num_keys <= window:
        return _scaled_dot_product(query, key, value, layer, is_causal=True)
    if num_queries == 1:
        return _scaled_dot_product(query, key[-window:], value[-window:], layer)
    pieces = []
    for begin in range(0, num_queries, QUERIES_IN_A_PIECE):
        piece = query[begin : begin + QUERIES_IN_A_PIECE]
        first = num_keys - num_queries + begin  # position of the piece's first query
        last = first + piece.shape[0] - 1
        oldest = max(0, first - window + 1)  # the oldest key that the piece can see
        query_position = torch.arange(first, last + 1, device=query.device)[:, None]
        key_position = torch.arange(oldest, last + 1, device=query.device)[None, :]
        mask = (key_position <= query_position) & (key_position > query_position - window)  # [piece, keys]
        keys, values = key[oldest : last + 1], value[oldest : last + 1]
        pieces.append(_scaled_dot_product(piece, keys, values, layer, mask=mask))
    return torch.cat(pieces)


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: AttentionLayerSpec,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """`scaled_dot_product` for one sequence, tokens before heads as the rest of the engine has them."""
    output = scaled_dot_product(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        layer,
        mask=mask,
        is_causal=is_causal,
    )
    return output[0].transpose(0, 1)


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: AttentionLayerSpec,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """softmax(scale * query key^T) value, by PyTorch's attention unless the layer caps its scores.

    Args:
        query: [B, query heads, Q, head_dim].
        key, value: [B, key heads, K, head_dim]; the number of key heads divides that of query heads.
        layer: scale and cap.
        mask: bool, broadcast to [B, query heads, Q, K]; True where a query sees a key.
        is_causal: query i sees keys 0..i; then there is no mask, and Q = K.

    Returns:
        [B, query heads, Q, head_dim].
    """
    if layer.softcap is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=layer.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-1, -2) * layer.scale  # [B, query heads, Q, K]
    scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value

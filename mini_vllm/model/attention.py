"""Attention as the model sees it: two small protocols and the values that cross them.

Where it stands: the worker plans a step (`AttentionBackend.begin`), the transformer calls the plan once a layer
(`StepAttention`), and neither the transformer nor the scheduler knows which backend runs.

    ScheduledBatch -> worker -> AttentionMetadata -> backend.begin -> StepAttention -> transformer, layer by layer

What always holds: a `StepAttention` first writes the new keys and values to where the metadata says, then attends; a
query at position p sees the keys at positions 0..p of its own sequence and nothing else.

In vLLM: `vllm/v1/attention/backends/` (`AttentionMetadata`, `AttentionImpl`) and `vllm/attention/layer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mini_vllm.cache.block_manager import BlockCopy


@dataclass(frozen=True)
class AttentionLayerSpec:
    """What a backend must know of one attention layer. It may differ from layer to layer.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads; divides num_heads (grouped-query attention, Ainslie et al. 2023).
        head_dim: width of one head.
        scale: what query-key products are multiplied by, usually head_dim ** -0.5.
        sliding_window: a query at position p sees keys at positions > p - sliding_window; None sees all.
        softcap: c of s -> c tanh(s / c) on the scaled products, before the softmax; None: no cap.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one step stand and where their keys and values live.

    The T tokens of the step lie flat, sequence after sequence, without padding. For three sequences, one that prefills
    four tokens and two that decode one each, with block_size 4::

        query_starts  [0, 4, 5, 6]          sequence i owns rows query_starts[i] : query_starts[i + 1]
        context_lens  [4, 9, 2]             tokens of each sequence once this step is done, new ones included
        block_tables  [[7, -, -],           logical block j of sequence i is pool block block_tables[i, j];
                       [3, 0, 5],           entries past the context are undefined and never read
                       [1, -, -]]
        slot_mapping  [28,29,30,31, 20, 5]  where each new token's key and value go:
                                            block_tables[i, position // 4] * 4 + position % 4

    Shapes and dtypes: query_starts [B + 1], context_lens [B], block_tables [B, M]: int32. slot_mapping [T]: int64.
    All on the model's device. The two maxima are plain integers, so that no backend has to wait for the device.

    With `only_last_tokens` nobody reads what the model returns for any but the last token of each sequence, and it may
    be anything: keys and values of the others are needed, but nothing behind them in the last layer.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_context_len: int
    only_last_tokens: bool = False


class StepAttention(Protocol):
    """The plan of one step, called by the transformer once for each layer, in order."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the new keys and values of this layer, then attend.

        Args:
            layer: index of the layer, 0 first.
            query: [T, num_heads, head_dim], rotary embedding applied.
            key: [T, num_kv_heads, head_dim], rotary embedding applied.
            value: [T, num_kv_heads, head_dim].

        Returns:
            [T, num_heads, head_dim] in query's dtype.
        """
        ...


class AttentionBackend(Protocol):
    """A way to store keys and values and to attend over them. It owns the memory layout.

    A backend need not implement every kind of layer: the class says what it lacks, before it is made.

    A backend is made for one block size, dtype and device (`attention_backends.make_backend`). For the contiguous cache
    a "block" is a slot for one whole sequence: the block tables have one column.
    """

    @staticmethod
    def lacks(layers: Sequence[AttentionLayerSpec]) -> str | None:
        """What these layers ask for that this backend does not implement, in words; None if it can run them."""
        ...

    def block_bytes(self, layers: Sequence[AttentionLayerSpec]) -> int:
        """Bytes that one block takes in all layers together; 0 if nothing is stored."""
        ...

    def allocate(self, layers: Sequence[AttentionLayerSpec], num_blocks: int) -> None:
        """Make the tensors that hold `num_blocks` blocks for every layer."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer, in the order given (copy on write)."""
        ...

    def begin(self, metadata: AttentionMetadata) -> StepAttention:
        """Plan one step. The work that all layers share is done here, once."""
        ...

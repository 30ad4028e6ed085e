"""No cache (`cache="none"`): every step computes the whole context anew and remembers nothing.

Where it stands: the first rung of the ladder. A step's tokens *are* the context, so keys and values come straight from
this step's projections. The work of step t grows with t, and that of a text with the square of its length: this is
what a KV cache saves.

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.model.attention import AttentionLayerSpec, AttentionMetadata
from mini_vllm.model.attention_backends.one_sequence import attend_one_sequence


class RecomputeBackend:
    """See the module. Block size, dtype and device are taken for the sake of the common signature."""

    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._layers: list[AttentionLayerSpec] = []

    @staticmethod
    def lacks(layers: Sequence[AttentionLayerSpec]) -> str | None:
        return None

    def block_bytes(self, layers: Sequence[AttentionLayerSpec]) -> int:
        return 0

    def allocate(self, layers: Sequence[AttentionLayerSpec], num_blocks: int) -> None:
        self._layers = list(layers)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Nothing is stored, so nothing is copied."""

    def begin(self, metadata: AttentionMetadata) -> RecomputeAttention:
        return RecomputeAttention(self._layers, metadata)


class RecomputeAttention:
    """One step: each sequence attends within its own rows of the batch."""

    def __init__(self, layers: list[AttentionLayerSpec], metadata: AttentionMetadata) -> None:
        self._layers = layers
        self._starts: list[int] = metadata.query_starts.tolist()

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        for start, end in zip(self._starts, self._starts[1:], strict=False):
            rows = slice(start, end)
            output[rows] = attend_one_sequence(query[rows], key[rows], value[rows], self._layers[layer])
        return output

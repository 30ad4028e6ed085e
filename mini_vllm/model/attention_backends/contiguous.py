"""The contiguous cache (`cache="contiguous"`): one slot of max_model_len tokens a sequence.

Where it stands: the second rung of the ladder. A slot is a block as long as the longest sequence, so the block table
has one column and a sequence's keys are one slice: no gathering, but all of the slot is taken however short the
sequence is.

    slot 0   [The cat sat on the mat . . . . . . . . . . . . . . . . . .]    6 of 24 places used
    slot 1   [Once upon a time there . . . . . . . . . . . . . . . . . .]    5 of 24

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.cache.kv_cache import PagedKVCache
from mini_vllm.model.attention import AttentionLayerSpec, AttentionMetadata
from mini_vllm.model.attention_backends.one_sequence import attend_one_sequence


class ContiguousBackend:
    """See the module. `slot_size` is the longest sequence in tokens."""

    def __init__(self, slot_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slot_size, self._dtype, self._device = slot_size, dtype, device
        self._layers: list[AttentionLayerSpec] = []
        self._cache = PagedKVCache([], 0, slot_size, dtype, device)

    @staticmethod
    def lacks(layers: Sequence[AttentionLayerSpec]) -> str | None:
        return None

    def block_bytes(self, layers: Sequence[AttentionLayerSpec]) -> int:
        return PagedKVCache.block_bytes(_head_shapes(layers), self._slot_size, self._dtype)

    def allocate(self, layers: Sequence[AttentionLayerSpec], num_blocks: int) -> None:
        self._layers = list(layers)
        self._cache = PagedKVCache(_head_shapes(layers), num_blocks, self._slot_size, self._dtype, self._device)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._cache.copy_blocks(copies)

    def begin(self, metadata: AttentionMetadata) -> ContiguousAttention:
        return ContiguousAttention(self._layers, self._cache, metadata)


class ContiguousAttention:
    """One step: write, then let each sequence attend over the filled part of its slot."""

    def __init__(self, layers: list[AttentionLayerSpec], cache: PagedKVCache, metadata: AttentionMetadata) -> None:
        self._layers, self._cache = layers, cache
        self._slot_mapping = metadata.slot_mapping
        starts: list[int] = metadata.query_starts.tolist()
        slots: list[int] = metadata.block_tables[:, 0].tolist()
        contexts: list[int] = metadata.context_lens.tolist()
        self._sequences = list(zip(starts, starts[1:], slots, contexts, strict=False))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._cache.write(layer, self._slot_mapping, key, value)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        output = torch.empty_like(query)
        for start, end, slot, context in self._sequences:
            output[start:end] = attend_one_sequence(
                query[start:end], keys[slot, :context], values[slot, :context], self._layers[layer]
            )
        return output


def _head_shapes(layers: Sequence[AttentionLayerSpec]) -> list[tuple[int, int]]:
    return [(layer.num_kv_heads, layer.head_dim) for layer in layers]

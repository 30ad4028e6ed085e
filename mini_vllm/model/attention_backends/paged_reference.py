"""PagedAttention in plain PyTorch (`attention_backend="reference"`): keys and values are read through the block table.

Where it stands: the default for `cache="paged"` where nothing faster fits, and what every fast kernel is
tested against.

The sequences of a step fall into three kinds, each with the plainest way to compute it:

    prefill, nothing cached   context = its own new tokens       attends within the batch's own rows; reads no cache
    prefill, cached prefix    several new tokens, older context  its slots are gathered, then as above
    decode                    one new token, older context       all decodes at once: gathered to [D, longest, ...]

How a decode finds its keys. Position j of a sequence lies in logical block j // block_size, at offset j % block_size:

    block table  [7, 2, 5]   block_size 4    position  0  1  2  3 | 4 5  6  7 | 8  9
                                             slot     28 29 30 31 | 8 9 10 11 | 20 21

The idea is PagedAttention (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention"). In vLLM: `csrc/attention/` and `vllm/v1/attention/backends/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.cache.kv_cache import PagedKVCache
from mini_vllm.model.attention import AttentionLayerSpec, AttentionMetadata
from mini_vllm.model.attention_backends.one_sequence import attend_one_sequence, scaled_dot_product


class PagedReferenceBackend:
    """See the module."""

    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size, self._dtype, self._device = block_size, dtype, device
        self._layers: list[AttentionLayerSpec] = []
        self._cache = PagedKVCache([], 0, block_size, dtype, device)

    @staticmethod
    def lacks(layers: Sequence[AttentionLayerSpec]) -> str | None:
        return None

    def block_bytes(self, layers: Sequence[AttentionLayerSpec]) -> int:
        shapes = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
        return PagedKVCache.block_bytes(shapes, self._block_size, self._dtype)

    def allocate(self, layers: Sequence[AttentionLayerSpec], num_blocks: int) -> None:
        self._layers = list(layers)
        shapes = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
        self._cache = PagedKVCache(shapes, num_blocks, self._block_size, self._dtype, self._device)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._cache.copy_blocks(copies)

    def begin(self, metadata: AttentionMetadata) -> PagedReferenceAttention:
        return PagedReferenceAttention(self._layers, self._cache, metadata)


@dataclass(frozen=True)
class _Decodes:
    """Where the keys of all decodes of a step lie, for layers with the same window.

    slots: [D, longest] int64, padded with the null slot. mask: [D, 1, 1, longest] bool, False at the padding.
    """

    slots: Tensor
    mask: Tensor


class PagedReferenceAttention:
    """One step over the paged cache."""

    def __init__(self, layers: list[AttentionLayerSpec], cache: PagedKVCache, metadata: AttentionMetadata) -> None:
        self._layers, self._cache, self._metadata = layers, cache, metadata
        query_lens = metadata.query_starts.diff()
        is_decode = (query_lens == 1) & (metadata.context_lens > 1)
        self._decodes = is_decode.nonzero().squeeze(1)  # [D] indexes of sequences
        self._decode_rows = metadata.query_starts[:-1][is_decode].long()  # [D] their rows in the flat batch
        starts, contexts = metadata.query_starts.tolist(), metadata.context_lens.tolist()
        self._prefills = [  # (sequence, first row, end row, context)
            (i, starts[i], starts[i + 1], contexts[i]) for i in (~is_decode).nonzero().squeeze(1).tolist()
        ]
        self._prefill_slots = {i: self._slots_of(i, c) for i, start, end, c in self._prefills if c > end - start}
        self._decodes_of_window: dict[int | None, _Decodes] = {}  # layers share these; each is made at its first layer

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._cache.write(layer, self._metadata.slot_mapping, key, value)
        spec = self._layers[layer]
        output = torch.empty_like(query)
        for sequence, start, end, _ in self._prefills:
            keys, values = key[start:end], value[start:end]
            if sequence in self._prefill_slots:
                keys, values = self._cache.read(layer, self._prefill_slots[sequence])
            output[start:end] = attend_one_sequence(query[start:end], keys, values, spec)
        if len(self._decode_rows):
            output[self._decode_rows] = self._decode(layer, query[self._decode_rows], spec)
        return output

    def _decode(self, layer: int, query: Tensor, spec: AttentionLayerSpec) -> Tensor:
        """query: [D, num_heads, head_dim], the newest token of each decode."""
        if spec.sliding_window not in self._decodes_of_window:
            self._decodes_of_window[spec.sliding_window] = self._plan_decodes(spec.sliding_window)
        plan = self._decodes_of_window[spec.sliding_window]
        keys, values = self._cache.read(layer, plan.slots)  # [D, longest, num_kv_heads, head_dim]
        # The query heads that share a key head stand where attention expects several queries: no key is repeated.
        output = scaled_dot_product(
            query.view(len(query), spec.num_kv_heads, -1, spec.head_dim),  # [D, num_kv_heads, group, head_dim]
            keys.transpose(1, 2),
            values.transpose(1, 2),
            spec,
            mask=plan.mask,
        )
        return output.flatten(1, 2)

    def _plan_decodes(self, window: int | None) -> _Decodes:
        contexts = self._metadata.context_lens[self._decodes].long()  # [D]
        first = torch.zeros_like(contexts) if window is None else (contexts - window).clamp(min=0)
        longest = int((contexts - first).max())
        positions = first[:, None] + torch.arange(longest, device=contexts.device)  # [D, longest]
        exists = positions < contexts[:, None]
        block_size = self._cache.block_size
        logical = (positions // block_size).clamp(max=self._metadata.block_tables.shape[1] - 1)
        blocks = self._metadata.block_tables[self._decodes].long().gather(1, logical)
        slots = torch.where(exists, blocks * block_size + positions % block_size, self._cache.null_slot)
        return _Decodes(slots, exists[:, None, None, :])

    def _slots_of(self, sequence: int, context: int) -> Tensor:
        """[context] int64: the slots of all positions of one sequence."""
        positions = torch.arange(context, device=self._metadata.block_tables.device)
        blocks = self._metadata.block_tables[sequence].long()[positions // self._cache.block_size]
        return blocks * self._cache.block_size + positions % self._cache.block_size

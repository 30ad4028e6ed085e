"""PagedAttention in C++ (`attention_backend="cpu"`): what `paged_reference` computes, at the speed of the memory.

Where it stands: the default for `cache="paged"` on a processor where the kernels are built. The layout of a block and
the way through the keys are pictured in `kernels/cpu/csrc/attention.h`.

What always holds: a token's result has the same bits whichever way it was computed: alone or in a batch, in prefill, in
a chunk or as a decode, with blocks of any size.

In vLLM: `vllm/v1/attention/backends/cpu_attn.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.cache.kv_cache import lazy_zeros
from mini_vllm.errors import InvalidConfigError
from mini_vllm.kernels.cpu import ops
from mini_vllm.kernels.cpu.build import load_kernels
from mini_vllm.model.attention import AttentionLayerSpec, AttentionMetadata
from mini_vllm.store.model_store import home


class PagedCpuBackend:
    """See the module.

    Raises:
        InvalidConfigError: not a processor, or a dtype that the kernels do not compute in.
        KernelBuildError: the kernels cannot be built here.
    """

    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
            raise InvalidConfigError(
                f"attention_backend='cpu' computes in float32 or bfloat16 on the CPU, not in {dtype} on {device}; use "
                "'reference' or 'auto'",
                field="attention_backend",
            )
        load_kernels(home())
        self._block_size, self._dtype, self._device = block_size, dtype, device
        self._layers: list[AttentionLayerSpec] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @staticmethod
    def lacks(layers: Sequence[AttentionLayerSpec]) -> str | None:
        return None

    def block_bytes(self, layers: Sequence[AttentionLayerSpec]) -> int:
        return sum(2 * layer.num_kv_heads * self._head_size(layer) * self._dtype.itemsize for layer in layers)

    def allocate(self, layers: Sequence[AttentionLayerSpec], num_blocks: int) -> None:
        self._layers = list(layers)
        shapes = [(num_blocks, layer.num_kv_heads, self._head_size(layer)) for layer in layers]
        self._keys = [lazy_zeros(shape, self._dtype, self._device) for shape in shapes]
        self._values = [lazy_zeros(shape, self._dtype, self._device) for shape in shapes]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for tensor in (*self._keys, *self._values):
            for copy in copies:
                tensor[copy.target] = tensor[copy.source]

    def begin(self, metadata: AttentionMetadata) -> PagedCpuAttention:
        return PagedCpuAttention(self._layers, self._keys, self._values, self._block_size, metadata)

    def _head_size(self, layer: AttentionLayerSpec) -> int:
        """Elements of one block for one head, the padding to whole vectors included."""
        return self._block_size * ops.padded_head_dim(layer.head_dim)


class PagedCpuAttention:
    """One step."""

    def __init__(
        self,
        layers: list[AttentionLayerSpec],
        keys: list[Tensor],
        values: list[Tensor],
        block_size: int,
        metadata: AttentionMetadata,
    ) -> None:
        self._layers, self._keys, self._values = layers, keys, values
        self._block_size = block_size
        self._where = (
            metadata.block_tables.contiguous(),
            metadata.query_starts,
            metadata.context_lens,
            metadata.slot_mapping,
        )
        self._only_last_tokens = metadata.only_last_tokens

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self._layers[layer]
        return ops.paged_attention(
            query,
            key,
            value,
            self._keys[layer],
            self._values[layer],
            *self._where,
            self._block_size,
            spec.scale,
            spec.softcap,
            spec.sliding_window,
        )

    def caches(self, first: int, count: int) -> ops.StepCaches:
        """What `ops.decoder_layers` must know to run layers [first, first + count) by itself."""
        specs = self._layers[first : first + count]
        return ops.StepCaches(
            self._keys[first : first + count],
            self._values[first : first + count],
            *self._where,
            self._block_size,
            specs[0].scale,
            specs[0].softcap,
            [spec.sliding_window for spec in specs],
            self._only_last_tokens and first + count == len(self._layers),
        )

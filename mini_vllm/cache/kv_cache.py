"""The tensors behind the block numbers: keys and values of every layer, in fixed-size blocks.

Where it stands: a backend allocates one; attention writes new keys and values into it and reads the old ones through
the block tables. The block manager decides which block is whose and never sees these tensors.

    keys[layer]   [num_blocks + 1, block_size, num_kv_heads, head_dim]
                   block 0 | block 1 | ... | null block
    as slots      [(num_blocks + 1) * block_size, num_kv_heads, head_dim],  slot = block * block_size + offset

A block table therefore holds *numbers of blocks*, not vectors. The null block at the end stays zero: a padded place in
a batched read points there, so that what lies in other people's blocks, be it NaN, never enters a product.

In vLLM: the KV cache tensors that `vllm/v1/worker/gpu_model_runner.py` allocates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mini_vllm.cache.block_manager import BlockCopy


class PagedKVCache:
    """Keys and values of all layers.

    Args:
        head_shapes: (num_kv_heads, head_dim) of each layer.
        num_blocks: blocks of the pool, the null block not counted.
        block_size: tokens in a block.
        dtype, device: of the tensors.
    """

    def __init__(
        self,
        head_shapes: Sequence[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.null_slot = num_blocks * block_size
        shapes = [(num_blocks + 1, block_size, heads, width) for heads, width in head_shapes]
        self.keys = [lazy_zeros(shape, dtype, device) for shape in shapes]
        self.values = [lazy_zeros(shape, dtype, device) for shape in shapes]

    def write(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new keys and values.

        Args:
            slot_mapping: [T] int64, the slot of each token.
            key, value: [T, num_kv_heads, head_dim].
        """
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, value)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of any slots: [*slots.shape, num_kv_heads, head_dim] each, copied together."""
        return self.keys[layer].flatten(0, 1)[slots], self.values[layer].flatten(0, 1)[slots]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer, in order."""
        for tensor in (*self.keys, *self.values):
            for copy in copies:
                tensor[copy.target] = tensor[copy.source]

    @staticmethod
    def block_bytes(head_shapes: Sequence[tuple[int, int]], block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block: keys and values, all layers."""
        return sum(2 * block_size * heads * width * dtype.itemsize for heads, width in head_shapes)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros that, on the CPU, takes memory only where it is written to.

    `torch.zeros` writes every byte, which for a pool of gigabytes takes seconds and all of the memory at once. NumPy
    asks the operating system for zeroed pages, which it hands out one by one as they are touched.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)

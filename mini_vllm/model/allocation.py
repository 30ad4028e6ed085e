"""Where weights lie: pages of their own while they are made, and huge pages for those that are packed.

Where it stands: around the loading of weights and around packing them for the kernels.

`large_blocks_apart`: both free a matrix just after another one of about its size was made. The C library keeps freed
blocks of up to 32 MB for later ones, but a hole of exactly that size seldom takes the next matrix, which wants its
place aligned; so the heap grows to almost twice the weights. Blocks with pages of their own go back to the system at
once: measured on a GPT-2 of 80 MB in bfloat16, the peak of loading and packing is 1.06 of the weights instead of 1.4
to 1.7.

`WeightMemory`: all packed matrices side by side in a few large stretches, which Linux backs with pages of 2 MB where it
may. Every step reads all weights once; with pages of 4 KB the processor looks up 66,000 addresses for 270 MB, which was
7 to 13 % of a step.

What always holds: after `large_blocks_apart` it is as before, in the state that the library reaches by itself once it
has freed a large block. Where there is no `mallopt` (macOS, musl) nothing is done.

In vLLM: nothing.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of `mallopt`'s parameters, from malloc.h
_LARGE = 256 * 1024  # bytes
_STRETCH = 64 * 1024 * 1024  # bytes that packed weights are given out of
_ALIGNMENT = 64  # bytes: a line of the caches
_LARGEST = 32 * 1024 * 1024  # the library's own upper limit; it trims at twice that


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Inside, blocks of 256 KB and more are mapped one by one."""
    _set_thresholds(mmap=_LARGE, trim=_LARGE)
    try:
        yield
    finally:
        _set_thresholds(mmap=_LARGEST, trim=2 * _LARGEST)


def _set_thresholds(*, mmap: int, trim: int) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, mmap)
    mallopt(_TRIM_THRESHOLD, trim)


class WeightMemory:
    """Gives tensors out of stretches of 64 MB. What is not given out is never touched, so it takes no memory.

    In the place of `torch.empty`: memory((rows, columns), dtype=torch.bfloat16).
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def __call__(self, shape: tuple[int, ...], /, *, dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes + _ALIGNMENT > len(self._rest):
            # NumPy asks for zeroed pages, huge ones, and the system makes them when they are first written to.
            self._rest = torch.from_numpy(np.zeros(max(_STRETCH, num_bytes + _ALIGNMENT), np.uint8))
        start = -self._rest.data_ptr() % _ALIGNMENT
        taken, self._rest = self._rest[start : start + num_bytes], self._rest[start + num_bytes :]
        return taken.view(dtype).view(shape)

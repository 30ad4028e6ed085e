"""While weights are made: give every large block of memory pages of its own.

Where it stands: around the loading of weights and around packing them for the kernels.

Both free a matrix just after another one of about its size was made. The C library keeps freed blocks of up to 32 MB
for later ones, but a hole of exactly that size seldom takes the next matrix, which wants its place aligned; so the heap
grows to almost twice the weights. Blocks with pages of their own go back to the system at once: measured on a GPT-2 of
80 MB in bfloat16, the peak of loading and packing is 1.06 of the weights instead of 1.4 to 1.7.

What always holds: afterwards it is as before, in the state that the library reaches by itself once it has freed a
large block. Where there is no `mallopt` (macOS, musl) nothing is done.

In vLLM: nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of `mallopt`'s parameters, from malloc.h
_LARGE = 256 * 1024  # bytes
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

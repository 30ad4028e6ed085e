"""Attention backends by name. Adding one is one file here and one line in `_MODULES`.

    name         cache        what it shows
    recompute    none         no cache at all: every step computes the whole context
    contiguous   contiguous   one slot of max_model_len a sequence; simple reads, much waste
    reference    paged        PagedAttention in plain PyTorch, read through block tables

In vLLM: `vllm/v1/attention/backends/registry.py`.
"""

from __future__ import annotations

import importlib

import torch

from mini_vllm.errors import InvalidConfigError
from mini_vllm.model.attention import AttentionBackend

# name -> (the cache kind it serves, module, class); a module is imported only when its backend is used
_MODULES: dict[str, tuple[str, str, str]] = {
    "recompute": ("none", "recompute", "RecomputeBackend"),
    "contiguous": ("contiguous", "contiguous", "ContiguousBackend"),
    "reference": ("paged", "paged_reference", "PagedReferenceBackend"),
}
_AUTOMATIC = {"none": "recompute", "contiguous": "contiguous", "paged": "reference"}


def make_backend(name: str, cache: str, block_size: int, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend `name` (`auto`: the one for the kind of cache).

    Args:
        cache: `none`, `contiguous` or `paged`.
        block_size: tokens in a block; for `contiguous` the slot of a sequence, in tokens.

    Raises:
        InvalidConfigError: no such backend, or it does not serve this cache.
    """
    if name == "auto":
        name = _AUTOMATIC[cache]
    if name not in _MODULES:
        raise InvalidConfigError(
            f"attention_backend must be auto or one of {', '.join(_MODULES)}, got {name!r}", field="attention_backend"
        )
    serves, module, class_name = _MODULES[name]
    if serves != cache:
        raise InvalidConfigError(
            f"attention_backend={name!r} works with cache={serves!r}, not with cache={cache!r}",
            field="attention_backend",
        )
    backend_class = getattr(importlib.import_module(f"{__name__}.{module}"), class_name)
    backend: AttentionBackend = backend_class(block_size, dtype, device)
    return backend

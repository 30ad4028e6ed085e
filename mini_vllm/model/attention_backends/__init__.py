"""Attention backends by name. Adding one is one file here and one line in `_MODULES`.

    name         cache        what it shows
    recompute    none         no cache at all: every step computes the whole context
    contiguous   contiguous   one slot of max_model_len a sequence; simple reads, much waste
    reference    paged        PagedAttention in plain PyTorch, read through block tables
    cpu          paged        the same in C++

In vLLM: `vllm/v1/attention/backends/registry.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from mini_vllm.errors import InvalidConfigError
from mini_vllm.model.attention import AttentionBackend, AttentionLayerSpec

# name -> (the cache kind it serves, module, class); a module is imported only when its backend is used
_MODULES: dict[str, tuple[str, str, str]] = {
    "recompute": ("none", "recompute", "RecomputeBackend"),
    "contiguous": ("contiguous", "contiguous", "ContiguousBackend"),
    "reference": ("paged", "paged_reference", "PagedReferenceBackend"),
    "cpu": ("paged", "paged_cpu", "PagedCpuBackend"),
}
_NEEDS_KERNELS = ("cpu",)
# What `auto` tries for each kind of cache; the last one implements every kind of layer.
_AUTOMATIC: dict[str, tuple[str, ...]] = {
    "none": ("recompute",),
    "contiguous": ("contiguous",),
    "paged": ("cpu", "reference"),
}


def make_backend(
    name: str,
    cache: str,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    layers: Sequence[AttentionLayerSpec] = (),
    kernels: bool = False,
) -> AttentionBackend:
    """The backend `name` (`auto`: the first one for the kind of cache that implements the layers).

    Args:
        name: of the backend.
        cache: `none`, `contiguous` or `paged`.
        block_size: tokens in a block; for `contiguous` the slot of a sequence, in tokens.
        dtype, device: of keys and values.
        layers: of the model that will run over it.
        kernels: whether `auto` may choose a backend that needs the C++ kernels.

    Raises:
        InvalidConfigError: no such backend, it does not serve this cache, or it lacks something that the layers need.
    """
    if name == "auto":
        possible = [each for each in _AUTOMATIC[cache] if kernels or each not in _NEEDS_KERNELS]
        name = next(each for each in possible if _backend_class(each).lacks(layers) is None)
    if name not in _MODULES:
        raise InvalidConfigError(
            f"attention_backend must be auto or one of {', '.join(_MODULES)}, got {name!r}", field="attention_backend"
        )
    serves = _MODULES[name][0]
    if serves != cache:
        raise InvalidConfigError(
            f"attention_backend={name!r} works with cache={serves!r}, not with cache={cache!r}",
            field="attention_backend",
        )
    backend_class = _backend_class(name)
    lacking = backend_class.lacks(layers)
    if lacking is not None:
        raise InvalidConfigError(
            f"attention_backend={name!r} does not implement {lacking}, which this model needs; use "
            f"{_AUTOMATIC[cache][-1]!r} or 'auto'",
            field="attention_backend",
        )
    backend: AttentionBackend = backend_class(block_size, dtype, device)
    return backend


def _backend_class(name: str) -> Any:
    """The class behind a name, its module imported now."""
    _, module, class_name = _MODULES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), class_name)

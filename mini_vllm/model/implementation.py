"""Who computes a model: the native transformer, the transformers library, or a class of the user's.

Where it stands: the first question of the loader.

    model_impl     auto           an installed package's class, else native, else the transformers library
                   native         the transformer of this package, or an error that lists what it has
                   transformers   that library's class with our attention (`hf_backend.py`), also where native exists
                   module:Class   a class marked with `register_model`

What always holds: the transformers library is imported only for a model that runs through it, and the log says so.

In vLLM: `ModelRegistry.resolve_model_cls` in `vllm/model_executor/models/registry.py`, and its option of this name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from mini_vllm.config import LoadFormat
from mini_vllm.errors import InvalidConfigError, UnsupportedModelError
from mini_vllm.model.architectures import find_architecture
from mini_vllm.model.language_model import LanguageModel, ModelSummary
from mini_vllm.model.model_files import read_raw_config
from mini_vllm.model.registered_model import load_registered_model
from mini_vllm.model.registry import installed_model_class, named_model_class
from mini_vllm.store.model_store import ModelFiles

logger = logging.getLogger(__name__)


class LoadOther(Protocol):
    """Loads a model that is not the native transformer."""

    def __call__(
        self, directory: Path, raw: Mapping[str, Any], *, dtype: torch.dtype, device: str, load_format: LoadFormat
    ) -> tuple[LanguageModel, ModelSummary]:
        """See `load_transformers_model` and `load_registered_model`."""
        ...


def choose_implementation(files: ModelFiles, model_impl: str) -> LoadOther | None:
    """Decide who computes the model of these files.

    Args:
        files: the model. GGUF files are native only.
        model_impl: see the head of this file.

    Returns:
        What loads it, or None for the native transformer.

    Raises:
        InvalidConfigError: `model_impl` is none of these, or names a class that does not fit.
        UnsupportedModelError: nothing here runs the model; the message says what would.
    """
    if model_impl == "native" or (model_impl == "auto" and files.format == "gguf"):
        return None
    if model_impl not in ("auto", "transformers") and ":" not in model_impl:
        raise InvalidConfigError(
            f"model_impl must be auto, native, transformers, or module:Class for a model of your own, got "
            f"{model_impl!r}",
            field="model_impl",
        )
    if files.format == "gguf":
        raise InvalidConfigError(
            f"model_impl={model_impl!r} reads safetensors, and {files.path} is a GGUF file; leave model_impl at auto",
            field="model_impl",
        )
    raw = read_raw_config(files)
    names = [name for name in raw.get("architectures") or () if isinstance(name, str)]
    if ":" in model_impl:
        return partial(load_registered_model, named_model_class(model_impl, names))
    if model_impl == "transformers":
        return _transformers_loader()
    if (installed := installed_model_class(names)) is not None:
        logger.info("%s runs through %s, which an installed package brings", names[0], installed.__qualname__)
        return partial(load_registered_model, installed)
    return None if _is_native(raw) else _fall_back_to_transformers(files, raw)


def _is_native(raw: Mapping[str, Any]) -> bool:
    try:
        find_architecture(raw.get("architectures"), raw.get("model_type"))
    except UnsupportedModelError:
        return False
    return True


def _fall_back_to_transformers(files: ModelFiles, raw: Mapping[str, Any]) -> LoadOther:
    load = _transformers_loader(f"{files.path}: architectures={raw.get('architectures')!r} is not native. ")
    logger.info("%s: %s is not native and runs through the transformers library", files.name, raw.get("architectures"))
    return load


def _transformers_loader(reason: str = "") -> LoadOther:
    try:
        from mini_vllm.model.hf_backend import load_transformers_model
    except ImportError as error:
        raise UnsupportedModelError(
            f"{reason}The transformers library, which runs most other decoders, cannot be imported ({error}): "
            "pip install 'mini-vllm[hf]'. `mini-vllm models --supported` lists what runs without it."
        ) from error
    return load_transformers_model

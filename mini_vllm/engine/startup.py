"""Start-up: from a model's name to the parts of an engine.

Where it stands: called once by `LLMEngine`. This is the only place of the engine that knows files.

    name -> model store -> tokenizer, chat template, generation defaults -> weights -> executor

In vLLM: `vllm/engine/arg_utils.py` and `vllm/v1/worker/gpu_worker.py` (`load_model`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mini_vllm.config import EngineConfig
from mini_vllm.engine.input_processor import ModelFacts
from mini_vllm.engine.llm_engine import EngineParts
from mini_vllm.model.device import resolve_device
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.loader import load_model
from mini_vllm.model.model_files import load_generation_config, read_raw_config
from mini_vllm.store.model_shapes import find_model
from mini_vllm.store.model_store import ModelFiles
from mini_vllm.tokenizer.chat_template import load_chat_template
from mini_vllm.tokenizer.stand_in import stand_in_tokenizer
from mini_vllm.tokenizer.tokenizer import Tokenizer, load_tokenizer
from mini_vllm.tokenizer.tokenizer_files import TOKENIZER_FILES
from mini_vllm.worker.executor import InProcessExecutor
from mini_vllm.worker.fast_path import prepare_kernels

logger = logging.getLogger(__name__)


def load_parts(config: EngineConfig) -> EngineParts:
    """Find the model, read its files and load its weights.

    Raises:
        InvalidConfigError, ModelNotFoundError, DownloadError, ModelLoadError: with what was tried and what to do.
    """
    device = resolve_device(config.device)
    files = find_model(config)
    tokenizer = _tokenizer(config, files)
    chat_template = load_chat_template(tokenizer, Path(config.chat_template) if config.chat_template else None)
    generation_config = load_generation_config(files)
    loaded = load_model(
        files,
        dtype=config.dtype,
        device=str(device),
        load_format=config.load_format,
        model_impl=config.model_impl,
    )
    architecture, dtype = loaded.config.architecture, str(loaded.dtype).removeprefix("torch.")
    logger.info("model %s: %s in %s on %s (%s)", files.name, architecture, dtype, device, loaded.dtype_reason)
    for note in loaded.config.notes:
        logger.info("model %s: %s", files.name, note)
    eos_token_ids = loaded.config.eos_token_ids | tokenizer.eos_token_ids | generation_config.eos_token_ids
    facts = ModelFacts(
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=eos_token_ids,
        generation_defaults=_generation_defaults(config, files, generation_config.sampling_defaults),
    )
    kernels = prepare_kernels(config, loaded.model, loaded.dtype, device)
    executor = InProcessExecutor(config, loaded.model, loaded.dtype, device, kernels)
    return EngineParts(executor, tokenizer, chat_template, facts, loaded.config.max_position_embeddings, files.name)


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer:
    """The model's own; for random weights beside which none lies, one that stands in for it."""
    has_none = files.path.is_dir() and not any((files.path / name).exists() for name in TOKENIZER_FILES)
    if config.load_format == "dummy" and has_none:
        logger.info("no tokenizer in %s: its tokens are bytes, and words that no text becomes", files.path)
        return stand_in_tokenizer(HFConfig(read_raw_config(files)).integer("vocab_size"))
    return load_tokenizer(files)


def _generation_defaults(config: EngineConfig, files: ModelFiles, defaults: dict[str, Any]) -> dict[str, Any]:
    """The sampling defaults that count, said in the log, since they change what a plain request gives."""
    if config.generation_config == "none" or not defaults:
        return {}
    logger.info(
        "sampling defaults from the generation_config of %s: %s (a request's own values win; "
        "generation_config='none' turns them off)",
        files.name,
        ", ".join(f"{name}={value}" for name, value in defaults.items()),
    )
    return defaults

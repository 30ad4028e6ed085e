"""The configurations of a model, whichever format it is in: what it is, and how its makers want it sampled.

Where it stands: asked at start by the loader and the engine, and by commands that only look at a model; no torch.

    safetensors    config.json                  generation_config.json
    GGUF           metadata, said as config.json (gguf_metadata.py) and kept under the model's cache directory

What always holds: a file that is there is read or the start stops; only `generation_config.json` may be absent.

In vLLM: `get_config` and `try_get_generation_config` in `vllm/transformers_utils/config.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mini_vllm.errors import InvalidRequestError, ModelLoadError
from mini_vllm.json_text import parse_json
from mini_vllm.model.config import ModelConfig, model_config_from_hf
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.store.atomic_write import atomic_file
from mini_vllm.store.model_store import ModelFiles

logger = logging.getLogger(__name__)

# The number goes up when the conversion changes, so that old results are not read.
_GGUF_CONFIG = "config-1.json"

# Keys of generation_config.json that are a `SamplingParams` field, with its name.
_SAMPLING_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)
# Keys that change the text in transformers and are not applied here, with the value under which they change nothing.
_NOT_APPLIED: Mapping[str, Any] = MappingProxyType(
    {
        "bad_words_ids": None,
        "encoder_repetition_penalty": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "exponential_decay_length_penalty": None,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "guidance_scale": None,
        "min_length": 0,
        "min_new_tokens": None,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "penalty_alpha": None,
        "sequence_bias": None,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "top_h": None,
        "typical_p": 1.0,
    }
)


@dataclass(frozen=True)
class GenerationConfig:
    """What the model's makers advise.

    Args:
        sampling_defaults: fields of `SamplingParams` with their values, valid ones; empty when nothing is advised.
        eos_token_ids: end-of-sequence ids that are named here.
    """

    sampling_defaults: dict[str, Any]
    eos_token_ids: frozenset[int]


def load_model_config(files: ModelFiles) -> ModelConfig:
    """Read what the model is.

    Raises:
        UnsupportedModelError: something in it is not implemented.
        ModelLoadError: no configuration, or a damaged one.
    """
    raw = read_raw_config(files)
    try:
        return model_config_from_hf(raw)
    except ModelLoadError as error:
        said = f"{files.path} (read as a config.json)" if files.format == "gguf" else files.path
        raise type(error)(f"{said}: {error}") from error


def read_raw_config(files: ModelFiles) -> dict[str, Any]:
    """The parsed `config.json`, or what the head of a GGUF file says in its terms.

    Raises:
        ModelLoadError: no configuration, or a damaged one.
    """
    if files.format == "gguf":
        config: dict[str, Any] = _gguf_configs(files)["config"]
        return config
    return _read_json(files.path / "config.json")


def load_generation_config(files: ModelFiles) -> GenerationConfig:
    """Read how the model's makers want it sampled.

    A `do_sample` that is false means greedy, as in transformers: temperature 0, whatever else is there. Where it is
    absent (which transformers takes for false, but most makers do not mean) the values that are given count.

    Raises:
        ModelLoadError: the file is damaged, or a value is out of its range.
    """
    if files.format == "gguf":
        return _read_generation_config(_gguf_configs(files)["generation_config"], str(files.path))
    path = files.path / "generation_config.json"
    if not path.exists():
        return GenerationConfig({}, frozenset())
    return _read_generation_config(_read_json(path), str(path))


def _read_generation_config(raw: Mapping[str, Any], where: str) -> GenerationConfig:
    defaults = {ours: raw[theirs] for theirs, ours in _SAMPLING_KEYS.items() if raw.get(theirs) is not None}
    if raw.get("do_sample") is False:
        kept = ("repetition_penalty", "max_tokens")
        defaults = {"temperature": 0.0, **{name: value for name, value in defaults.items() if name in kept}}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelLoadError(
            f"The sampling defaults in {where} are wrong: {error}. Correct them, or remove the file to do without."
        ) from error
    ignored = [key for key, neutral in _NOT_APPLIED.items() if raw.get(key) not in (None, neutral)]
    if ignored:
        logger.warning("%s sets %s, which mini vLLM does not apply", where, ", ".join(ignored))
    return GenerationConfig(defaults, _token_ids(raw.get("eos_token_id"), where))


def _token_ids(value: Any, where: str) -> frozenset[int]:
    """One id, a list of ids, or None."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelLoadError(f"eos_token_id in {where} must be a token id or a list of them, not {value!r}.")
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ModelLoadError: absent, not readable, not JSON, or not an object.
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.parent} has no {path.name}. Incomplete download?") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(content).__name__}. Download it again.")
    return content


def _gguf_configs(files: ModelFiles) -> dict[str, Any]:
    """{"config": ..., "generation_config": ...} of a GGUF file, as JSON files would have them.

    The head of the file holds the whole vocabulary, so what was read once is kept; the cache directory is another one
    as soon as the file changes. What is found there but cannot be read is made again.
    """
    kept = files.cache_dir / _GGUF_CONFIG
    try:
        configs = _read_json(kept)
        if configs.keys() == {"config", "generation_config"}:
            return configs
    except ModelLoadError as error:
        if kept.exists():
            logger.warning("%s; reading the model's own file", error)
    configs = _configs_of_head(files.path)
    try:
        with atomic_file(kept) as unfinished:
            unfinished.write_text(json.dumps(configs, indent=1), encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(
            f"The configuration read from {files.path} cannot be kept in {kept.parent}: {error}. Free the disk, or set "
            "MINI_VLLM_HOME to a folder that can be written to."
        ) from error
    return configs


def _configs_of_head(path: Path) -> dict[str, Any]:
    # Imported late: only the first start of a GGUF model needs these.
    from mini_vllm.model.gguf_metadata import generation_config, hf_config
    from mini_vllm.store.gguf_file import read_gguf

    file = read_gguf(path)
    return {"config": hf_config(file), "generation_config": generation_config(file)}

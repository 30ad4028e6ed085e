"""From a model's files to a model that is ready to run.

Where it stands: called once at start, by the engine or by the naive loops.

    configuration  ->  dtype  ->  checkpoint fits?  ->  Transformer without memory (meta device)  <-  mapped weights

    safetensors    mapped; only what is fused (q/k/v, gate/up) or stored in another dtype takes memory
    GGUF           converted once into a file of fused parameters, then mapped (converted_weights.py)

An architecture that is not native goes to `hf_backend.py` or `registered_model.py`; see `implementation.py`.

What always holds: every parameter comes from the checkpoint, or the start stops with an error that names the tensor. No
weight is ever in memory twice, apart from the one that is being made.

In vLLM: `vllm/model_executor/model_loader/default_loader.py` and `gguf_loader.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mini_vllm.config import LoadFormat
from mini_vllm.model.allocation import large_blocks_apart
from mini_vllm.model.architectures import tied_head, weight_map
from mini_vllm.model.config import ModelConfig
from mini_vllm.model.converted_weights import convert, converted_path, load_converted
from mini_vllm.model.dtype import resolve_dtype
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.implementation import choose_implementation
from mini_vllm.model.language_model import LanguageModel, ModelDescription
from mini_vllm.model.model_files import load_model_config, read_raw_config
from mini_vllm.model.renamed_source import with_wanted_names
from mini_vllm.model.safetensors_source import SafetensorsSource
from mini_vllm.model.transformer import Transformer, init_random_weights
from mini_vllm.model.weight_map import WeightSpec
from mini_vllm.model.weight_source import WeightSource, check_fit, read_parameters
from mini_vllm.store.model_store import ModelFiles

logger = logging.getLogger(__name__)

# Rotary frequencies, and the causal masks of GPT-2 and GPT-NeoX.
_COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", "attn.masked_bias", ".attention.bias", ".attention.masked_bias")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run.

    Args:
        model: in evaluation mode, without gradients. Its weights may be views of mapped files: never write to them.
        config: what it is.
        dtype: of its weights and activations.
        dtype_reason: why this one, as a clause for the log.
    """

    model: LanguageModel
    config: ModelDescription
    dtype: torch.dtype
    dtype_reason: str


def load_model(
    files: ModelFiles,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: LoadFormat = "auto",
    model_impl: str = "auto",
) -> LoadedModel:
    """Load a model.

    Args:
        files: where it is.
        dtype: "auto", "float32", "bfloat16" or "float16"; see `resolve_dtype`.
        device: where it will run.
        load_format: "auto" reads the checkpoint, "dummy" fills in random weights.
        model_impl: who computes it; see `choose_implementation`.

    Raises:
        ModelLoadError: a file or a tensor is missing, damaged or of the wrong shape.
        UnsupportedModelError: the model needs something that is not implemented.
        InvalidConfigError: an unknown dtype or implementation.
    """
    started = time.perf_counter()
    load = choose_implementation(files, model_impl)
    if load is None:
        with large_blocks_apart():
            loaded = _load_native(files, dtype, device, load_format)
    else:
        raw = read_raw_config(files)
        choice = resolve_dtype(dtype, device, HFConfig(raw).dtype())
        model, summary = load(files.path, raw, dtype=choice.dtype, device=device, load_format=load_format)
        loaded = LoadedModel(model, summary, choice.dtype, choice.reason)
    logger.info("loaded %s in %.2f s", files.name, time.perf_counter() - started)
    return loaded


def _load_native(files: ModelFiles, dtype: str, device: str, load_format: LoadFormat) -> LoadedModel:
    config = load_model_config(files)
    choice = resolve_dtype(dtype, device, config.checkpoint_dtype)
    if load_format == "dummy":
        model = Transformer(config, dtype=choice.dtype, device=device)
        with torch.no_grad():
            init_random_weights(model)
    elif files.format == "gguf":
        model = build_model(config, _gguf_parameters(files, config, choice.dtype), choice.dtype, device)
    else:
        with closing(_open_safetensors(files, config)) as source:
            config = settle_head(config, source, choice.dtype)
            check_fit(source, weight_map(config), ignored=_is_harmless)
            parameters = read_parameters(source, weight_map(config), choice.dtype)
            model = build_model(config, parameters, choice.dtype, device)
    return LoadedModel(model.eval(), config, choice.dtype, choice.reason)


def build_model(
    config: ModelConfig, parameters: Iterator[tuple[str, Tensor]], dtype: torch.dtype, device: str
) -> Transformer:
    """A transformer around tensors that exist already: they become its parameters and are not copied.

    Args:
        config: what to build.
        parameters: every parameter with its name, on the CPU; each is moved to `device` as it comes.
        dtype: theirs.
        device: where the model runs.
    """
    model = Transformer(config, dtype=dtype, device="meta")
    state = {name: parameter.to(device) for name, parameter in parameters}
    model.load_state_dict(state, strict=True, assign=True)
    return model


def _open_safetensors(files: ModelFiles, config: ModelConfig) -> WeightSource:
    specs, head = weight_map(config), tied_head(config)
    wanted = [name for spec in (*specs, *([head] if head else [])) for name in spec.sources]
    return with_wanted_names(SafetensorsSource(files.path), specs[0].sources[0], wanted)


def settle_head(config: ModelConfig, source: WeightSource, dtype: torch.dtype) -> ModelConfig:
    """Whether the head is really tied, where the configuration says so but the checkpoint holds a head all the same.

    An equal one is a copy and is not loaded. A different one means that the configuration is wrong; see `tied_head`.
    """
    head = tied_head(config)
    if head is None:
        return config
    names = (weight_map(config)[0].sources[0], head.sources[0])  # of the embedding and of the head
    if not source.names().issuperset(names):
        return config
    if source.shape(names[0]) == source.shape(names[1]) and torch.equal(*(source.read(name, dtype) for name in names)):
        return config
    logger.warning(
        "%s says tie_word_embeddings, but %s differs from %s; both are used", source.path, names[1], names[0]
    )
    return replace(config, tie_word_embeddings=False)


def _gguf_parameters(files: ModelFiles, config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The converted parameters of a GGUF file, converted now if they were not before."""
    specs = weight_map(config)
    path = converted_path(files.cache_dir, dtype)
    parameters = load_converted(path, specs, dtype)
    if parameters is None:
        _convert_gguf(files, specs, dtype)
        parameters = load_converted(path, specs, dtype)
    if parameters is None:
        raise RuntimeError(f"the weights were just written to {path}, and do not read back")
    return iter(parameters.items())


def _convert_gguf(files: ModelFiles, specs: list[WeightSpec], dtype: torch.dtype) -> None:
    # Imported late: only the first start of a GGUF model in a dtype needs these.
    from mini_vllm.model.gguf_metadata import reordered_heads
    from mini_vllm.model.gguf_source import GGUFSource
    from mini_vllm.store.gguf_file import read_gguf

    path = converted_path(files.cache_dir, dtype)
    logger.info("converting the weights of %s to %s, once: %s", files.name, dtype, path)
    file = read_gguf(files.path)
    with closing(GGUFSource(file, reordered_heads(file))) as source:
        check_fit(source, specs, ignored=_is_harmless)
        convert(source, specs, dtype, path)


def _is_harmless(name: str) -> bool:
    """Tensors that are computed from the configuration, which some checkpoints hold all the same."""
    return name.endswith(_COMPUTED) or name == "rope_freqs.weight"

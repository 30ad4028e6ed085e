"""`mini-vllm pull`: fetch a model now, so that later starts need no network.

In vLLM: nothing.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mini_vllm.config import DEFAULT_MODEL
from mini_vllm.store.model_store import resolve_model


def pull(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A known name or a Hugging Face id (org/name).")
    ] = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face id.")] = None,
) -> None:
    """Fetch a model, and print where it is.

    What is in the store already is not fetched again.

    The store is ~/.cache/mini-vllm, or the folder that MINI_VLLM_HOME names.

    Examples:

      mini-vllm pull

      mini-vllm pull TinyLlama/TinyLlama-1.1B-Chat-v1.0
    """
    files = resolve_model(model, revision=revision)
    print(f"{files.name} is here: {format_bytes(files.size)}", file=sys.stderr)
    print(files.path)


def format_bytes(count: int) -> str:
    """`98 MB`, as shops count: in powers of 1000."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"

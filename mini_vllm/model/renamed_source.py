"""Checkpoints whose tensors have other prefixes than usual, under the names that the weight map asks for.

Where it stands: between a source and the loader; most checkpoints go through unchanged.

    wanted   model.embed_tokens.weight                      found   embed_tokens.weight
             transformer.h.0.ln_1.weight                            h.0.ln_1.weight
             model.layers.0.mlp.down_proj.weight                    language_model.model.layers.0.mlp.down_proj.weight

What always holds: the embedding decides. If exactly one tensor's name ends like the embedding's, what stands before is
the prefix of all; otherwise nothing is renamed. Shapes are compared afterwards as for any checkpoint.

In vLLM: `WeightsMapper` and `AutoWeightsLoader` in `vllm/model_executor/models/utils.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mini_vllm.model.weight_source import WeightSource

logger = logging.getLogger(__name__)


class RenamedSource:
    """Another source's tensors, some of them under new names.

    Args:
        source: the checkpoint.
        theirs: new name -> name in the checkpoint.
    """

    def __init__(self, source: WeightSource, theirs: Mapping[str, str]) -> None:
        self._source, self._theirs = source, theirs

    @property
    def path(self) -> Path:
        return self._source.path

    def names(self) -> frozenset[str]:
        return (self._source.names() - frozenset(self._theirs.values())) | frozenset(self._theirs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._theirs.get(name, name))

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._source.read(self._theirs.get(name, name), dtype)

    def close(self) -> None:
        self._source.close()


def with_wanted_names(source: WeightSource, embedding: str, wanted: Iterable[str]) -> WeightSource:
    """The source, its tensors renamed if it calls them by another prefix.

    Args:
        source: the checkpoint.
        embedding: the wanted name of the embedding, such as "model.embed_tokens.weight".
        wanted: all names that the model may ask for, the embedding's among them.
    """
    names = source.names()
    usual, _, ending = embedding.partition(".")
    alike = [name for name in names if _ends_with(name, ending)]
    if embedding in names or len(alike) != 1:
        return source
    found = alike[0].removesuffix(ending)
    theirs = {}
    for name in wanted:
        renamed = found + name.removeprefix(f"{usual}.") if name.startswith(f"{usual}.") else _only_like(name, names)
        if renamed in names and name not in names:
            theirs[name] = renamed
    logger.info("%s calls its tensors %s... where %s... is usual", source.path, alike[0], embedding)
    return RenamedSource(source, theirs)


def _only_like(wanted: str, names: frozenset[str]) -> str:
    """The one name that ends like the wanted one (of the head, say), or the wanted name itself."""
    alike = [name for name in names if _ends_with(name, wanted)]
    return alike[0] if len(alike) == 1 else wanted


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")

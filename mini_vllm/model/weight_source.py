"""`WeightSource`: a checkpoint as the loader sees it, whatever its format.

Where it stands: `safetensors_source.py` and `gguf_source.py` implement it; `loader.py` and `converted_weights.py` read
from it.

What always holds: names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), and so is the order of rows. A
source knows all names and shapes before it reads any data, so a checkpoint that does not fit is refused at once.

In vLLM: the iterators of `vllm/model_executor/model_loader/weight_utils.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mini_vllm.errors import ModelLoadError
from mini_vllm.model.weight_map import WeightSpec

logger = logging.getLogger(__name__)

_SHOWN_NAMES = 5  # a message about many tensors names so many


class WeightSource(Protocol):
    """Named tensors of one checkpoint."""

    @property
    def path(self) -> Path:
        """The file or directory, for messages."""
        ...

    def names(self) -> frozenset[str]:
        """All tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, known without reading it."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor in the wanted dtype, on the CPU.

        Where the file holds that dtype it is a view of the mapped file, valid also after `close`, and must not be
        written to. Otherwise it is new memory, and hardly more than its own size is needed to make it.
        """
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


def check_fit(source: WeightSource, specs: Sequence[WeightSpec], *, ignored: Callable[[str], bool]) -> None:
    """Compare a checkpoint with what the model needs, before anything is read.

    Tensors that nobody asks for are one warning.

    Args:
        source: the checkpoint.
        specs: what the model needs.
        ignored: says of a name whether it is known to be harmless.

    Raises:
        ModelLoadError: a tensor is missing or has another shape.
    """
    names = source.names()
    wanted = {
        name: shape for spec in specs for name, shape in zip(spec.sources, spec.shapes, strict=True)
    }  # HF name -> shape
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ModelLoadError(
            f"{source.path} lacks {_some(missing)}, which the model's configuration asks for. Either the download is "
            "incomplete, or configuration and weights do not belong together."
        )
    for name, shape in wanted.items():
        if source.shape(name) != shape:
            raise ModelLoadError(
                f"Tensor {name} in {source.path} has shape {list(source.shape(name))}, but the model's configuration "
                f"asks for {list(shape)}. Configuration and weights do not belong together."
            )
    extra = sorted(name for name in names if name not in wanted and not ignored(name))
    if extra:
        logger.warning("%s holds %s that this model does not use", source.path, _some(extra))


def read_parameters(
    source: WeightSource, specs: Iterable[WeightSpec], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the transformer with its name, one by one, so that the caller can let go of each.

    A parameter with one source stays a view of the mapped file if the file holds `dtype`; several are joined.

    Raises:
        ModelLoadError: a value is not finite in `dtype`.
    """
    for spec in specs:
        parts = [source.read(name, dtype) for name in spec.sources]
        if spec.rearrange is not None:
            parts = [spec.rearrange(part) for part in parts]
        parameter = parts[0] if len(parts) == 1 else torch.cat(parts)
        if dtype is torch.float16 and not all(bound.isfinite() for bound in torch.aminmax(parameter)):
            raise ModelLoadError(
                f"{' or '.join(spec.sources)} in {source.path} holds values beyond 65504, the largest of float16. "
                "Use dtype bfloat16 or float32."
            )
        yield spec.parameter, parameter


def _some(names: Sequence[str]) -> str:
    """ "the tensor a", or "12 tensors: a, b, c, d, e ..."."""
    if len(names) == 1:
        return f"the tensor {names[0]}"
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{len(names)} tensors: {shown}{' ...' if len(names) > _SHOWN_NAMES else ''}"

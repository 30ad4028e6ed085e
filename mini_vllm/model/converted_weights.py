"""Weights of a GGUF model, converted once: dequantised, rounded to the dtype that runs, fused, and mapped ever after.

Where it stands: between the loader and `GGUFSource`.

    first start    GGUF --dequantise, restore row order, fuse--> <cache_dir>/weights-1-bfloat16.safetensors
    later starts                                                 the same file, mapped: nothing is read until it is used

The file is an ordinary safetensors file under the names of our own parameters. It is written tensor by tensor, so the
conversion needs the memory of one tensor and not of the model. (The safetensors library can only write what is all in
memory.) The format is a length, that many bytes of JSON, and the data without gaps::

    <u64 head length> {"norm.weight": {"dtype": "BF16", "shape": [576], "data_offsets": [0, 1152]}, ...} <data>

What always holds: the file appears whole or not at all. It is used only if names, shapes, dtype and length are exactly
those that the model needs; otherwise it is made again. It lies in the model's cache directory, which is another one as
soon as the GGUF file changes.

In vLLM: nothing; GGUF weights are read anew at each start. `sharded_state_loader.py` comes nearest.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_vllm.errors import ModelLoadError
from mini_vllm.model.safetensors_source import open_safetensors
from mini_vllm.model.weight_map import WeightSpec
from mini_vllm.model.weight_source import WeightSource, read_parameters
from mini_vllm.store.atomic_write import atomic_file

logger = logging.getLogger(__name__)

_VERSION = 1  # goes up when the conversion changes, so that old results are not read
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 64  # bytes; the data begins at a multiple, as vector instructions like it


def converted_path(cache_dir: Path, dtype: torch.dtype) -> Path:
    """Where the converted weights of a model lie for one dtype."""
    return cache_dir / f"weights-{_VERSION}-{str(dtype).removeprefix('torch.')}.safetensors"


def load_converted(path: Path, specs: Sequence[WeightSpec], dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Map the converted weights.

    Args:
        path: the file.
        specs: the parameters that the model needs.
        dtype: theirs.

    Returns:
        every parameter by its name, views of the mapped file; None if the file is absent or is not what is needed.
    """
    if not path.exists():
        return None
    try:
        with open_safetensors(path) as file:
            found = {name: _description(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 - not a dict
            if found != {spec.parameter: (_DTYPE_NAMES[dtype], parameter_shape(spec)) for spec in specs}:
                raise ModelLoadError(f"{path} holds other tensors than the model needs")
            return {name: file.get_tensor(name) for name in found}
    except ModelLoadError as error:
        logger.warning("%s; converting the weights again", error)
        return None


def convert(source: WeightSource, specs: Sequence[WeightSpec], dtype: torch.dtype, path: Path) -> None:
    """Read all weights of a checkpoint and write them fused, in `dtype`.

    Args:
        source: the checkpoint.
        specs: the parameters that the model needs; they fit the checkpoint.
        dtype: of the result.
        path: the file to write.

    Raises:
        ModelLoadError: the file cannot be written.
    """
    try:
        with atomic_file(path) as unfinished:
            _write(unfinished, specs, dtype, read_parameters(source, specs, dtype))
    except OSError as error:
        size = sum(math.prod(parameter_shape(spec)) for spec in specs) * dtype.itemsize
        raise ModelLoadError(
            f"The weights of {source.path} cannot be kept in {path.parent}: {error}. They take {size / 1e6:.0f} MB in "
            "this dtype; free the disk, or set MINI_VLLM_HOME to a folder that has room and can be written to."
        ) from error


def parameter_shape(spec: WeightSpec) -> tuple[int, ...]:
    """The shape of a parameter: its sources joined along dimension 0."""
    return (sum(shape[0] for shape in spec.shapes), *spec.shapes[0][1:])


def _write(
    path: Path, specs: Sequence[WeightSpec], dtype: torch.dtype, parameters: Iterable[tuple[str, Tensor]]
) -> None:
    with path.open("wb") as file:
        file.write(_head(specs, dtype))
        for _, parameter in parameters:  # in the order of specs
            file.write(parameter.contiguous().flatten().view(torch.uint8).numpy().data)


def _head(specs: Sequence[WeightSpec], dtype: torch.dtype) -> bytes:
    """The length and the JSON, filled up with spaces."""
    entries: dict[str, Any] = {}
    offset = 0
    for spec in specs:
        shape = parameter_shape(spec)
        end = offset + math.prod(shape) * dtype.itemsize
        entries[spec.parameter] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _description(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a tensor in an open safetensors file."""
    return tensor.get_dtype(), tuple(tensor.get_shape())

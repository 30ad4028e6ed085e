"""Checkpoints in safetensors format: one file, or shards that an index lists.

Where it stands: opened by the loader for every model directory; gives it named tensors as views of the mapped files.

    model.safetensors.index.json     {"weight_map": {"lm_head.weight": "model-00003-of-00003.safetensors", ...}}
    model-00001-of-00003.safetensors
    ...

What always holds: with an index, a tensor comes from the file that the index names and from nowhere else, whatever
other files lie beside it. Without one there is exactly one file. Every shard was there, and had every tensor that it
is listed for, before the first tensor was read. Pickles (`.bin`, `.pt`) are never opened: loading one can run any code.

In vLLM: `safetensors_weights_iterator` in `vllm/model_executor/model_loader/weight_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.json_text import parse_json

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_SHARD_PATTERN = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_DTYPES = ("F32", "F16", "BF16")


class SafetensorsSource:
    """A directory with a safetensors checkpoint, as a `WeightSource`.

    Args:
        directory: the model's directory.

    Raises:
        ModelLoadError: no checkpoint, a missing shard, a damaged file, or an index that does not fit its shards.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}  # tensor name -> the open file that holds it
        index = directory / INDEX_NAME
        try:
            if index.exists():
                self._file_of = self._open_shards(index)
            else:
                file = self._open(find_single_file(directory))
                self._file_of = dict.fromkeys(file.keys(), file)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self._directory

    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        file = self._file_of[name]
        stored = file.get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise UnsupportedModelError(
                f"Tensor {name} in {self._directory} has dtype {stored}, which is not implemented; supported: "
                f"{', '.join(_DTYPES)}. Get the model in bfloat16, float16 or float32."
            )
        tensor: Tensor = file.get_tensor(name)
        return tensor.to(dtype)

    def close(self) -> None:
        self._stack.close()
        self._file_of = {}

    def _open(self, path: Path) -> Any:
        return self._stack.enter_context(open_safetensors(path))

    def _open_shards(self, index: Path) -> dict[str, Any]:
        """Every tensor that the index lists, with the open shard that holds it."""
        weight_map = _read_weight_map(index)
        shards = sorted(set(weight_map.values()))
        absent = [shard for shard in shards if not (self._directory / shard).is_file()]
        if absent:
            raise ModelLoadError(
                f"{self._directory} lacks {len(absent)} of the {len(shards)} files that {INDEX_NAME} lists: "
                f"{', '.join(absent)}. Incomplete download? Download the model again."
            )
        opened = {shard: self._open(self._directory / shard) for shard in shards}
        held = {shard: frozenset(file.keys()) for shard, file in opened.items()}
        for name, shard in weight_map.items():
            if name not in held[shard]:
                raise ModelLoadError(
                    f"{INDEX_NAME} in {self._directory} says that {shard} holds {name}, but it does not. The index "
                    "belongs to other files; download the model again."
                )
        return {name: opened[shard] for name, shard in weight_map.items()}


def open_safetensors(path: Path) -> Any:
    """Map a safetensors file and check its head against its length.

    Returns:
        the `safe_open` of the safetensors library; a context manager.

    Raises:
        ModelLoadError: the file cannot be opened, is damaged, or was cut short.
    """
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ModelLoadError(
            f"{path} is damaged or cut short ({error}). Incomplete download? Download it again."
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error


def find_single_file(directory: Path) -> Path:
    """The file that holds the whole model when there is no index.

    `model.safetensors` is it, whatever lies beside it. A single file of another name will do, unless its name says that
    it is one of several.

    Raises:
        ModelLoadError: no such file, or several that could be it.
    """
    if (directory / _SINGLE_NAME).exists():
        return directory / _SINGLE_NAME
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if not found:
        raise ModelLoadError(_nothing_found(directory))
    shard = _SHARD_PATTERN.search(found[0])
    if len(found) > 1 or (shard and int(shard[2]) > 1):
        raise ModelLoadError(
            f"{directory} has {len(found)} safetensors file(s) ({', '.join(found[:3])}{' ...' if found[3:] else ''}) "
            f"but neither {_SINGLE_NAME} nor {INDEX_NAME}, which would say what belongs together. Incomplete download? "
            "Download the model again."
        )
    return directory / found[0]


def _nothing_found(directory: Path) -> str:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{directory} has its weights only as pickles ({', '.join(pickles[:3])}), which can run any code when they "
            "are loaded and are never opened here. Get the safetensors files of the model, or convert it where you "
            "trust it: transformers' model.save_pretrained(DIRECTORY) writes them."
        )
    return f"{directory} has no weights: neither {_SINGLE_NAME} nor {INDEX_NAME}. Incomplete download?"


def _read_weight_map(index: Path) -> Mapping[str, str]:
    """The index's tensor names with the file of each.

    Raises:
        ModelLoadError: not JSON, no `weight_map`, or a file name that leads out of the directory.
    """
    try:
        content = parse_json(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{index} cannot be read as JSON ({error}). Download it again.") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map from tensor names to files. Download it again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            raise ModelLoadError(
                f"{index} says that {name} lies in {shard!r}; only the name of a safetensors file beside it will do."
            )
    return weight_map

"""The head of a GGUF file: its metadata, and where each tensor lies.

Where it stands: below the tokenizer, the configuration and the weights of a GGUF model, which all start here. What the
bytes of a tensor mean is left to the `gguf` package.

    "GGUF"  version  tensor count  metadata count
    metadata    key, type, value             "llama.block_count", uint32, 30
    tensors     name, dimensions, type, offset      "blk.0.attn_q.weight", (576, 576), Q4_1, 31981568
    padding to a multiple of general.alignment
    data        offsets count from here

`gguf.GGUFReader` reads the same, but keeps several NumPy arrays for each string: 3 seconds and 160 MB for the 98,052
strings of a small tokenizer. One pass over the mapped file takes a tenth of a second. The tests hold the two together.

What always holds: every length is checked against the size of the file before it is believed, so a file that was cut
short is refused here with a message that says so, and no tensor can reach over its end. No torch is needed.

In vLLM: `gguf_quant_weights_iterator` in `vllm/model_executor/model_loader/weight_utils.py`, with `GGUFReader`.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_vllm.errors import ModelLoadError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

# The numbers that GGUF gives to the types of metadata values, and how `struct` spells them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies and how it is stored.

    Args:
        name: GGUF's name, such as "blk.0.attn_q.weight".
        shape: rows first, as PyTorch counts (GGUF writes it the other way round).
        type_name: "F32", "Q4_1" and so on, as `gguf.GGMLQuantizationType` names it.
        offset: first byte in the file.
        num_bytes: length in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """The head of a file.

    Args:
        path: the file.
        metadata: every key with its value: int, float, bool, str, or a list of one of these.
        tensors: every tensor by its name, in the order of the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the head of a GGUF file.

    Raises:
        ModelLoadError: the file cannot be opened, is not a GGUF file, is damaged, or was cut short.
        UnsupportedModelError: another version, big-endian, split into several files, or an unknown tensor type.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _read_head(path, _Cursor(mapped))
    except (struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ModelLoadError(f"{path} is damaged or cut short ({error}). Download it again.") from error
    except (OSError, ValueError) as error:  # mmap refuses an empty file with a ValueError
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error


class _Cursor:
    """A place in the mapped file that moves on with what is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.position = 0

    def scalar(self, code: str) -> Any:
        """One little-endian number; `code` is that of `struct`."""
        value = struct.unpack_from(f"<{code}", self.data, self.position)[0]
        self.position += struct.calcsize(f"<{code}")
        return value

    def scalars(self, code: str, count: int) -> list[Any]:
        """Several numbers of one kind."""
        size = struct.calcsize(f"<{code}") * count
        return list(struct.unpack(f"<{count}{code}", self.take(size)))

    def string(self) -> str:
        """A length and that many bytes of UTF-8."""
        return self.take(self.scalar("Q")).decode("utf-8")

    def take(self, size: int) -> bytes:
        """The next `size` bytes."""
        end = self.position + size
        if end > self.size:
            raise struct.error(f"{size} bytes wanted at byte {self.position} of {self.size}")
        taken = self.data[self.position : end]
        self.position = end
        return taken


def _read_head(path: Path, cursor: _Cursor) -> GGUFFile:
    _check_version(path, cursor)
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = _read_value(path, cursor, cursor.scalar("I"), key)
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedModelError(
            f"{path} is one of {metadata['split.count']} pieces of a split GGUF, which is not implemented. "
            "Merge them with `llama-gguf-split --merge` and load the result."
        )
    infos = [_read_tensor_info(path, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"general.alignment in {path} is {alignment!r}, not a positive number.")
    start = math.ceil(cursor.position / alignment) * alignment
    return GGUFFile(path, metadata, _place_tensors(path, infos, start, cursor.size))


def _check_version(path: Path, cursor: _Cursor) -> None:
    magic = cursor.take(4) if cursor.size >= 4 else b""
    if magic != _MAGIC:
        raise ModelLoadError(f"{path} is not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}. Download it again.")
    version = cursor.scalar("I")
    if version & 0xFFFF == 0:  # version 3 of the other byte order reads as 0x03000000
        raise UnsupportedModelError(f"{path} is a big-endian GGUF file; get the little-endian one.")
    if version not in _VERSIONS:
        supported = " and ".join(map(str, _VERSIONS))
        raise UnsupportedModelError(f"{path} is GGUF version {version}; versions {supported} are implemented.")


def _read_value(path: Path, cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.string()
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    if kind != _ARRAY:
        raise ModelLoadError(f"{key} in {path} has the unknown type {kind}. The file is damaged; download it again.")
    item_kind, count = cursor.scalar("I"), cursor.scalar("Q")
    if item_kind in _SCALARS:
        return cursor.scalars(_SCALARS[item_kind], count)
    if item_kind == _STRING:
        return [cursor.string() for _ in range(count)]
    raise UnsupportedModelError(f"{key} in {path} is an array of type {item_kind}, which is not implemented.")


@dataclass(frozen=True)
class _TensorInfo:
    """A tensor as the head lists it: the type a number, the offset counted from the data's start."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _read_tensor_info(path: Path, cursor: _Cursor) -> _TensorInfo:
    name, num_dimensions = cursor.string(), cursor.scalar("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise ModelLoadError(f"Tensor {name} in {path} has {num_dimensions} dimensions; GGUF allows {_MAX_DIMENSIONS}.")
    shape = tuple(reversed(cursor.scalars("Q", num_dimensions)))
    return _TensorInfo(name, shape, cursor.scalar("I"), cursor.scalar("Q"))


def _place_tensors(path: Path, infos: list[_TensorInfo], start: int, file_size: int) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise ModelLoadError(f"{path} lists the tensor {info.name} twice. Download it again.")
        type_name, num_bytes = _storage(path, info)
        end = start + info.offset + num_bytes
        if end > file_size:
            raise ModelLoadError(
                f"{path} is cut short: tensor {info.name} ends at byte {end}, but the file has {file_size}. "
                "Incomplete download? Download it again."
            )
        tensors[info.name] = GGUFTensor(info.name, info.shape, type_name, start + info.offset, num_bytes)
    return tensors


def _storage(path: Path, info: _TensorInfo) -> tuple[str, int]:
    """The name of a tensor's type, and how many bytes it takes: whole blocks of so many elements and bytes a row."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(info.kind)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"Tensor {info.name} in {path} has type {info.kind}, which the installed gguf package does not know."
        ) from error
    if info.shape and info.shape[-1] % block_elements:
        raise ModelLoadError(
            f"Tensor {info.name} in {path} has rows of {info.shape[-1]}, which is not a multiple of the "
            f"{block_elements} that a block of {kind.name} holds. The file is damaged; download it again."
        )
    return str(kind.name), math.prod(info.shape) // block_elements * block_bytes

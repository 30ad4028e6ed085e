"""The head of a GGUF file: equal to what the gguf package reads, and refused wherever it is cut."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf_helpers import finish

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.store.gguf_file import read_gguf
from mini_vllm.store.model_store import ModelFiles


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with a value of each kind and tensors of several types."""
    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    for number, kind in enumerate(("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")):
        getattr(writer, f"add_{kind}")(f"a.{kind}", number if kind.startswith("u") else -number)
    writer.add_float32("a.float32", 0.1)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "龜 🫠")
    writer.add_array("a.strings", ["", "x", "世界"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.25])
    writer.add_array("a.bools", [True, False])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.arange(5, dtype=np.float16))
    writer.add_tensor("blocks", np.zeros((2, 36), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q4_0)
    finish(writer)
    return tmp_path / "small.gguf"


def _assert_equals_reader(path: Path) -> None:
    ours, theirs = read_gguf(path), GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape.tolist()[::-1])
        assert (found.type_name, found.offset, found.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_every_kind_of_value_and_tensor_is_read_as_the_gguf_package_reads_it(small: Path) -> None:
    _assert_equals_reader(small)
    assert read_gguf(small).tensors["blocks"].shape == (2, 64)


def test_the_default_model_is_read_as_the_gguf_package_reads_it(smollm2_files: ModelFiles) -> None:
    _assert_equals_reader(smollm2_files.path)


def test_alignment_of_the_file_is_followed(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("one", np.ones(3, dtype=np.float32))
    writer.add_tensor("two", np.ones(3, dtype=np.float32))
    finish(writer)
    _assert_equals_reader(tmp_path / "a.gguf")
    assert read_gguf(tmp_path / "a.gguf").tensors["two"].offset % 256 == 0


def test_a_file_that_is_cut_short_anywhere_is_refused_with_its_name(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    last = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(small).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(last):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=re.escape(str(cut))):
            read_gguf(cut)
    cut.write_bytes(whole[:last])  # only padding is missing
    assert read_gguf(cut).tensors.keys() == read_gguf(small).tensors.keys()


def test_a_cut_in_the_data_names_the_tensor_and_the_sizes(small: Path) -> None:
    tensor = read_gguf(small).tensors["blocks"]
    small.write_bytes(small.read_bytes()[: tensor.offset + 10])
    message = f"tensor blocks ends at byte {tensor.offset + 72}, but the file has {tensor.offset + 10}"
    with pytest.raises(ModelLoadError, match=message):
        read_gguf(small)


@pytest.mark.parametrize("content", [b"", b"GG", b"<html>not found</html>", b"\x80\x02}q\x00"])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=re.escape(str(path))):
        read_gguf(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_gguf(tmp_path / "none.gguf")


def _head(
    *, version: int = 3, tensors: bytes = b"", num_tensors: int = 0, values: bytes = b"", num_values: int = 0
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + values + tensors


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _tensor(name: str, dimensions: list[int], kind: int) -> bytes:
    return _string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, 0)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (_head(version=1), "version 1; versions 2 and 3"),
        (_head(version=4), "version 4"),
        (_head(version=0x03000000), "big-endian"),
        (_head(values=_string("split.count") + struct.pack("<IH", 2, 3), num_values=1), "one of 3 pieces"),
        (_head(tensors=_tensor("a", [32], 4), num_tensors=1), "Tensor a .* type 4"),
        (_head(values=_string("k") + struct.pack("<IIQ", 9, 9, 1), num_values=1), "k in .* array of type 9"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, head: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head + bytes(256))
    with pytest.raises(UnsupportedModelError, match=message):
        read_gguf(path)


_HUGE = 2**63


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (_head(num_values=1, values=struct.pack("<Q", _HUGE)), "damaged or cut short"),
        (_head(num_tensors=_HUGE), "damaged or cut short|ends at byte"),
        (_head(num_values=1, values=_string("k") + struct.pack("<IIQ", 9, 4, _HUGE)), "damaged or cut short"),
        (_head(num_values=1, values=_string("k") + struct.pack("<I", 77)), "k in .* unknown type 77"),
        (_head(num_tensors=1, tensors=_tensor("a", [_HUGE, _HUGE], 0)), "cut short: tensor a"),
        (_head(num_tensors=1, tensors=_tensor("a", [1] * 9, 0)), "9 dimensions"),
        (_head(num_tensors=1, tensors=_tensor("a", [33], 2)), "rows of 33, .* 32 that a block of Q4_0"),
        (_head(num_tensors=2, tensors=_tensor("a", [1], 0) * 2), "lists the tensor a twice"),
        (
            _head(num_values=1, values=_string("general.alignment") + struct.pack("<II", 4, 0)),
            "general.alignment in .* is 0",
        ),
    ],
)
def test_impossible_numbers_are_refused_without_being_believed(tmp_path: Path, head: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head + bytes(256))
    with pytest.raises(ModelLoadError, match=message):
        read_gguf(path)


def test_no_torch_is_needed(small: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mini_vllm.store.gguf_file import read_gguf;"
        f"read_gguf(Path({str(small)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

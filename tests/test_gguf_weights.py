"""GGUF tensors: names, order of rows and quantisation, against the gguf package and checkpoints of transformers."""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf_helpers import finish, write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel, build_tiny_model, load_tiny_model

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.model import converted_weights
from mini_vllm.model.gguf_metadata import reordered_heads
from mini_vllm.model.gguf_source import GGUFSource, hf_name, restore_row_order
from mini_vllm.model.loader import load_model
from mini_vllm.store.gguf_file import read_gguf
from mini_vllm.store.model_store import ModelFiles

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Rows of 256, which every type's blocks divide.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_VLLM_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tiny(family: str, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny_model(tmp_path_factory.mktemp(family), FAMILIES[family])


def _open(files: ModelFiles) -> GGUFSource:
    file = read_gguf(files.path)
    return GGUFSource(file, reordered_heads(file))


def _random_blocks(kind: GGMLQuantizationType, shape: tuple[int, int], seed: int = 0) -> np.ndarray[Any, Any]:
    """Bytes that are valid blocks of a type: [rows, bytes of a row].

    The types that the gguf package can quantise are made from random numbers. Of the others any bytes are valid, but
    scales that are not finite would be: blocks with those are drawn again.
    """
    draw = np.random.default_rng(seed)
    try:
        return gguf.quantize(draw.standard_normal(shape, dtype=np.float32), kind)
    except NotImplementedError:
        elements, size = GGML_QUANT_SIZES[kind]
        blocks: list[np.ndarray[Any, Any]] = []
        while len(blocks) < shape[0] * shape[1] // elements:
            block = draw.integers(0, 256, size=(1, size), dtype=np.uint8)
            with np.errstate(all="ignore"):
                if np.isfinite(gguf.dequantize(block, kind)).all():
                    blocks.append(block)
        return np.concatenate(blocks).reshape(shape[0], -1)


QUANTISED = [kind for kind in GGMLQuantizationType if kind in gguf.quants._type_traits]


def test_the_types_that_must_be_read_are_among_those_tested() -> None:
    assert {"BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"} <= {kind.name for kind in QUANTISED}


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, *QUANTISED], ids=lambda k: k.name)
def test_every_type_gives_what_the_gguf_package_gives(
    kind: GGMLQuantizationType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_vllm.model.gguf_source._SLAB_ELEMENTS", 1000)  # three rows of 256 at a time, not all ten
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", _random_blocks(kind, (10, 256)), raw_dtype=kind)
    finish(writer)
    expected = torch.from_numpy(gguf.dequantize(GGUFReader(path).tensors[0].data, kind).copy())
    with closing(GGUFSource(read_gguf(path), {})) as source:
        name = "model.layers.0.mlp.up_proj.weight"
        assert source.names() == {name}
        assert source.shape(name) == (10, 256)
        assert torch.equal(source.read(name, torch.float32), expected)
        assert torch.equal(source.read(name, torch.bfloat16), expected.to(torch.bfloat16))
        assert expected.unique().numel() > 10


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((2, 4), dtype=np.int8))
    finish(writer)
    with (
        closing(GGUFSource(read_gguf(tmp_path / "a.gguf"), {})) as source,
        pytest.raises(UnsupportedModelError, match=r"output.weight .* is stored as I8"),
    ):
        source.read("lm_head.weight", torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_those_of_the_gguf_package(name: str) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], 12)
    modules = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    modules += [f"self_attn.{letter}_proj" for letter in "qkvo"]
    modules += ["self_attn.q_norm", "self_attn.k_norm"] if name == "qwen3" else []
    for hf in ["model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.11.{module}" for module in modules)]:
        theirs = names.get_name(f"{hf}.weight", try_suffixes=(".weight",))
        assert theirs is not None
        assert hf_name(theirs) == f"{hf}.weight"


def test_tensors_without_another_name_keep_theirs() -> None:
    assert hf_name("rope_freqs.weight") == "rope_freqs.weight"
    assert hf_name("blk.3.attn_sinks.weight") == "blk.3.attn_sinks.weight"


def test_rows_of_a_head_of_eight_are_put_back_in_order() -> None:
    stored = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15])
    assert restore_row_order(stored, num_heads=2).tolist() == list(range(16))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_saved_as_gguf_has_the_parameters_and_the_configuration_of_the_checkpoint(
    family: str, tmp_path: Path, tied: bool
) -> None:
    biases = {} if family == "qwen2" else {"attention_bias": True}
    tiny = build_tiny_model(tmp_path / "hf", FAMILIES[family], tie_word_embeddings=tied, **biases)
    loaded = load_model(write_gguf(tiny.directory, tmp_path / "a.gguf", family), dtype="float32")
    expected = load_tiny_model(tiny)
    assert loaded.config == dataclasses.replace(
        expected.config,
        checkpoint_dtype=None,
        norm_eps=pytest.approx(expected.config.norm_eps),
    )
    assert loaded.config.tie_word_embeddings is tied
    theirs = expected.state_dict()
    ours = loaded.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


def test_quantised_matrices_are_rounded_once_to_the_dtype_that_runs(tmp_path: Path) -> None:
    tiny = build_tiny_model(tmp_path / "hf", "LlamaForCausalLM", **WIDE)
    files = write_gguf(tiny.directory, tmp_path / "a.gguf", "llama", kind=GGMLQuantizationType.Q8_0)
    original = load_file(tiny.directory / "model.safetensors")["model.embed_tokens.weight"].numpy()
    q8 = GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(original, q8), q8)).to(torch.bfloat16)
    loaded = load_model(files, dtype="bfloat16")
    assert torch.equal(loaded.model.embed_tokens.weight, expected)


def test_one_tensor_left_out_stops_the_start(family: str, tiny: TinyModel, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    files = write_gguf(tiny.directory, tmp_path / "a.gguf", family, skip=(name,))
    with pytest.raises(ModelLoadError, match=f"a.gguf lacks the tensor {name}"):
        load_model(files)


# -- Converted weights -------------------------------------------------------------------------------------------------


def _files(tmp_path: Path) -> tuple[ModelFiles, Path]:
    """A GGUF model that was loaded once in float32, and its converted file."""
    tiny = build_tiny_model(tmp_path / "hf", "LlamaForCausalLM")
    files = write_gguf(tiny.directory, tmp_path / "a.gguf", "llama")
    load_model(files, dtype="float32")
    return files, converted_weights.converted_path(files.cache_dir, torch.float32)


def test_the_second_start_maps_the_converted_file_and_reads_no_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, converted = _files(tmp_path)
    before = converted.stat()

    def fail(*_: object) -> None:
        raise AssertionError("the GGUF file was read again")

    monkeypatch.setattr("mini_vllm.store.gguf_file.read_gguf", fail)
    second = load_model(files, dtype="float32")
    assert converted.stat() == before
    assert torch.equal(
        second.model.state_dict()["layers.0.attention.qkv_proj.weight"],
        load_file(converted)["layers.0.attention.qkv_proj.weight"],
    )


def test_the_converted_file_is_a_plain_safetensors_file_with_aligned_data(tmp_path: Path) -> None:
    files, converted = _files(tmp_path)
    tensors = load_file(converted)
    state = load_model(files, dtype="float32").model.state_dict()
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    assert (8 + int.from_bytes(converted.read_bytes()[:8], "little")) % 64 == 0


def test_each_dtype_has_a_converted_file_of_its_own(tmp_path: Path) -> None:
    files, converted = _files(tmp_path)
    load_model(files, dtype="bfloat16")
    assert {path.name for path in converted.parent.glob("weights*")} == {
        "weights-1-float32.safetensors",
        "weights-1-bfloat16.safetensors",
    }


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_model(path: Path) -> None:
    save_file({"norm.weight": torch.zeros(3)}, path)


def _other_shape(path: Path) -> None:
    tensors = load_file(path)
    tensors["norm.weight"] = torch.zeros(31)
    save_file(tensors, path)


def _other_dtype(path: Path) -> None:
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("damage", [_cut, _empty, _other_model, _other_shape, _other_dtype])
def test_a_converted_file_that_is_not_what_is_needed_is_made_again(
    damage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, converted = _files(tmp_path)
    expected = converted.read_bytes()
    damage(converted)
    with caplog.at_level(logging.WARNING):
        load_model(files, dtype="float32")
    assert converted.read_bytes() == expected
    assert len(caplog.records) == 1
    assert str(converted) in caplog.records[0].message


def test_a_changed_gguf_file_is_converted_anew(tmp_path: Path) -> None:
    files, converted = _files(tmp_path)
    other = build_tiny_model(tmp_path / "other", "LlamaForCausalLM", seed=1)
    write_gguf(other.directory, files.path, "llama")
    os.utime(files.path, ns=(0, 0))
    loaded = load_model(files, dtype="float32")
    assert torch.equal(loaded.model.embed_tokens.weight, load_tiny_model(other).embed_tokens.weight)
    assert converted_weights.converted_path(files.cache_dir, torch.float32) != converted


def test_a_conversion_that_fails_leaves_nothing_and_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build_tiny_model(tmp_path / "hf", "LlamaForCausalLM")
    files = write_gguf(tiny.directory, tmp_path / "a.gguf", "llama")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(converted_weights, "_write", full)
    with pytest.raises(ModelLoadError, match=r"No space left on device.*They take 0 MB .* set MINI_VLLM_HOME"):
        load_model(files, dtype="float32")
    assert [path.name for path in files.cache_dir.iterdir()] == ["config-1.json"]


def test_a_truncated_gguf_is_refused_before_anything_is_converted(tmp_path: Path) -> None:
    tiny = build_tiny_model(tmp_path / "hf", "LlamaForCausalLM")
    files = write_gguf(tiny.directory, tmp_path / "a.gguf", "llama")
    files.path.write_bytes(files.path.read_bytes()[:-500])
    with pytest.raises(ModelLoadError, match=r"a.gguf is cut short: tensor .* Incomplete download"):
        load_model(files)
    assert not files.cache_dir.exists()


def test_a_damaged_kept_configuration_is_made_again(tmp_path: Path) -> None:
    files, _ = _files(tmp_path)
    kept = files.cache_dir / "config-1.json"
    expected = kept.read_text()
    for damaged in ("", "{", "[]", "{}"):
        kept.write_text(damaged)
        load_model(files, dtype="float32")
        assert kept.read_text() == expected


def test_rows_are_reordered_for_llama_alone(tmp_path: Path) -> None:
    found = {}
    for name, architecture in FAMILIES.items():
        tiny = build_tiny_model(tmp_path / name, architecture)
        with closing(_open(write_gguf(tiny.directory, tmp_path / f"{name}.gguf", name))) as source:
            heads = source._reordered_heads
        found[name] = heads
    assert found == {"llama": {"q_proj": 4, "k_proj": 2}, "qwen2": {}, "qwen3": {}}

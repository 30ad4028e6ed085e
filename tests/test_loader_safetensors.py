"""Safetensors checkpoints: whole, in shards, damaged, and beside files that do not belong to them."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel, build_tiny_model, load_tiny_model, our_logits, some_tokens
from torch import Tensor

from mini_vllm.errors import InvalidConfigError, ModelLoadError, UnsupportedModelError
from mini_vllm.model.layers import TiedHead
from mini_vllm.model.loader import LoadedModel, load_model
from mini_vllm.store.model_store import ModelFiles

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_tiny_model(tmp_path_factory.mktemp("tied"), "LlamaForCausalLM", tie_word_embeddings=True)


@pytest.fixture
def directory(tiny: TinyModel, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny.directory, tmp_path / "model"))


@pytest.fixture
def sharded(directory: Path) -> Path:
    """The same in three shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    weight_map = {name: SHARDS[number % 3] for number, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in weight_map if weight_map[name] == shard}, directory / shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    (directory / "model.safetensors").unlink()
    return directory


def _load(directory: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelFiles("tiny", directory, "safetensors"), dtype=dtype)


def _change(directory: Path, change: Callable[[Tensors], Any]) -> None:
    """Rewrite model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def _change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _assert_equal(loaded: LoadedModel, tiny: TinyModel) -> None:
    expected = load_tiny_model(tiny).state_dict()
    found = loaded.model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


# -- One file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_logits_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    tiny = build_tiny_model(tmp_path, architecture)
    token_ids = some_tokens(40)
    logits = our_logits(_load(tmp_path).model, token_ids)
    torch.testing.assert_close(logits, tiny.logits(token_ids), atol=1e-4, rtol=0)


def test_the_model_is_ready_to_run(tiny: TinyModel) -> None:
    loaded = _load(tiny.directory)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert {(parameter.dtype, parameter.device.type) for parameter in loaded.model.parameters()} == {
        (torch.float32, "cpu")
    }
    assert loaded.config.num_layers == 3


def test_weights_are_read_into_every_dtype_from_every_dtype(tiny: TinyModel, directory: Path) -> None:
    original = load_file(tiny.directory / "model.safetensors")
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        save_file({name: tensor.to(stored) for name, tensor in original.items()}, directory / "model.safetensors")
        for wanted in ("float32", "bfloat16", "float16"):
            weight = _load(directory, wanted).model.layers[2].mlp.down_proj.weight
            expected = original["model.layers.2.mlp.down_proj.weight"].to(stored).to(getattr(torch, wanted))
            assert weight.dtype is getattr(torch, wanted)
            assert torch.equal(weight, expected)


def test_values_beyond_float16_are_refused_in_float16_alone(directory: Path) -> None:
    _change(directory, lambda tensors: tensors["model.norm.weight"].fill_(70_000.0))
    assert _load(directory, "bfloat16").model.norm.weight[0] == 70_144
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight in .* beyond 65504.* Use dtype bfloat16"):
        _load(directory, "float16")


def test_any_missing_tensor_is_named(tiny: TinyModel, directory: Path) -> None:
    tensors = load_file(tiny.directory / "model.safetensors")
    for name in tensors:
        rest = {other: value for other, value in tensors.items() if other != name}
        save_file(rest, directory / "model.safetensors")
        with pytest.raises(ModelLoadError, match=re.escape(f"{directory} lacks the tensor {name}, ")):
            _load(directory)


def test_many_missing_tensors_are_counted_and_a_few_named(directory: Path) -> None:
    _change_config(directory, num_hidden_layers=5)
    with pytest.raises(ModelLoadError, match=r"18 tensors: model\.layers\.3\.input_layernorm\.weight, .* \.\.\."):
        _load(directory)


def test_a_wrong_shape_is_refused_with_both_shapes(directory: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    _change(directory, lambda tensors: tensors.update({name: torch.zeros(32, 16)}))  # as many numbers, another shape
    message = f"Tensor {name} in {directory} has shape [32, 16], but the model's configuration asks for [16, 32]"
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        _load(directory)


def test_extra_tensors_are_one_warning_that_names_a_few(
    tiny: TinyModel, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {f"visual.{number}.weight": torch.zeros(1) for number in range(9)}
    _change(directory, lambda tensors: tensors.update(extra))
    with caplog.at_level(logging.WARNING):
        _assert_equal(_load(directory), tiny)
    (record,) = caplog.records
    assert "9 tensors: visual.0.weight, visual.1.weight" in record.message
    assert "visual.8" not in record.message


def test_stored_frequencies_of_the_rotary_embedding_are_no_warning(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _change(directory, lambda tensors: tensors.update({name: torch.zeros(4)}))
    with caplog.at_level(logging.WARNING):
        _load(directory)
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_other_stored_dtypes_are_refused_by_name(directory: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    _change(directory, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(UnsupportedModelError, match=rf"{re.escape(name)} .* has dtype (F8_E4M3|I8|F64)"):
        _load(directory)


@pytest.mark.parametrize("missing_bytes", [1, 100, 20_000])
def test_a_file_that_is_cut_short_is_named(directory: Path, missing_bytes: int) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-missing_bytes])
    with pytest.raises(ModelLoadError, match=re.escape(f"{path} is damaged or cut short")):
        _load(directory)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:00"])
def test_a_file_of_something_else_is_named(directory: Path, content: bytes) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=re.escape(str(path))):
        _load(directory)


# -- Heads -------------------------------------------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding(tied: TinyModel) -> None:
    loaded = _load(tied.directory)
    assert isinstance(loaded.model.lm_head, TiedHead)
    torch.testing.assert_close(our_logits(loaded.model, [1, 2, 3]), tied.logits([1, 2, 3]), atol=1e-4, rtol=0)


def test_a_tied_head_that_is_stored_all_the_same_is_not_loaded_twice(
    tied: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(shutil.copytree(tied.directory, tmp_path / "both"))
    _change(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    loaded = _load(directory)
    assert isinstance(loaded.model.lm_head, TiedHead)
    assert loaded.config.tie_word_embeddings


def test_a_head_that_differs_from_the_embedding_is_used_whatever_the_configuration_says(
    tied: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(shutil.copytree(tied.directory, tmp_path / "both"))
    head = torch.randn(97, 32)
    _change(directory, lambda tensors: tensors.update({"lm_head.weight": head}))
    with caplog.at_level(logging.WARNING):
        loaded = _load(directory)
    assert not isinstance(loaded.model.lm_head, TiedHead)
    assert torch.equal(loaded.model.lm_head.weight, head)
    assert not loaded.config.tie_word_embeddings
    assert ["differs from" in record.message for record in caplog.records] == [True]


def test_a_tied_head_does_not_stand_in_for_a_missing_embedding(tied: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tied.directory, tmp_path / "model"))
    _change(directory, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    with pytest.raises(ModelLoadError, match=r"lacks the tensor model\.embed_tokens\.weight"):
        _load(directory)


def test_an_untied_head_that_is_missing_stops_the_start(tied: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tied.directory, tmp_path / "model"))
    _change_config(directory, tie_word_embeddings=False)
    with pytest.raises(ModelLoadError, match=r"lacks the tensor lm_head\.weight"):
        _load(directory)


# -- Shards ------------------------------------------------------------------------------------------------------------


def test_three_shards_give_what_the_single_file_gives(tiny: TinyModel, sharded: Path) -> None:
    _assert_equal(_load(sharded), tiny)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_missing_shard_is_named(sharded: Path, shard: str) -> None:
    (sharded / shard).unlink()
    with pytest.raises(ModelLoadError, match=rf"lacks 1 of the 3 files .*: {re.escape(shard)}\. Incomplete download\?"):
        _load(sharded)


def test_a_shard_that_is_cut_short_is_named(sharded: Path) -> None:
    path = sharded / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match=rf"{re.escape(str(path))} is damaged or cut short"):
        _load(sharded)


def test_files_and_tensors_that_the_index_does_not_list_change_nothing(
    tiny: TinyModel, sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(tiny.directory / "model.safetensors").items()}
    save_file(zeros, sharded / "model.safetensors")  # a stray single file
    save_file(zeros, sharded / "consolidated.safetensors")
    for shard in SHARDS:  # every shard holds every tensor, wrong ones except where the index says
        save_file({**zeros, **load_file(sharded / shard)}, sharded / shard)
    with caplog.at_level(logging.WARNING):
        _assert_equal(_load(sharded), tiny)
    assert not caplog.records


def test_an_index_that_lists_a_tensor_in_the_wrong_shard_is_stale(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = SHARDS[0]
    assert "model.norm.weight" not in load_file(sharded / SHARDS[0])
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=rf"{re.escape(SHARDS[0])} holds model\.norm\.weight, but it does not"):
        _load(sharded)


def test_a_tensor_that_the_index_forgets_is_missing_though_a_shard_holds_it(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"lacks the tensor model\.norm\.weight"):
        _load(sharded)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_no_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(ModelLoadError, match=re.escape(str(sharded / INDEX))):
        _load(sharded)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "pytorch_model-1.bin", ""])
def test_an_index_cannot_lead_out_of_the_directory_or_to_a_pickle(sharded: Path, file: str) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ModelLoadError, match=rf"model\.norm\.weight lies in {re.escape(repr(file))}"):
        _load(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(ModelLoadError, match=r"has 3 safetensors file\(s\) .* neither model\.safetensors nor"):
        _load(sharded)
    for shard in SHARDS[1:]:
        (sharded / shard).unlink()
    with pytest.raises(ModelLoadError, match=r"has 1 safetensors file\(s\) .* Incomplete download\?"):
        _load(sharded)


# -- Other files -------------------------------------------------------------------------------------------------------


def test_a_single_file_may_have_another_name(tiny: TinyModel, directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "tiny-llama.safetensors")
    _assert_equal(_load(directory), tiny)


def test_pickles_beside_safetensors_are_not_looked_at(tiny: TinyModel, directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"would run code")
    _assert_equal(_load(directory), tiny)


def test_pickles_alone_are_refused_with_a_hint(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"only as pickles \(pytorch_model\.bin\).*\.save_pretrained"):
        _load(directory)


def test_no_weights_at_all_are_refused(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no weights"):
        _load(directory)


def test_no_configuration_is_refused(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        _load(directory)


@pytest.mark.parametrize("content", ["", "{", "[]", "\ufeff{}"])
def test_a_damaged_configuration_is_named(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelLoadError, match=re.escape(str(directory / "config.json"))):
        _load(directory)


def test_a_refused_configuration_names_the_directory(directory: Path) -> None:
    _change_config(directory, hidden_act="relu2")
    with pytest.raises(UnsupportedModelError, match=re.escape(str(directory)) + r": hidden_act='relu2'"):
        _load(directory)


# -- Without weights ---------------------------------------------------------------------------------------------------


def test_dummy_weights_need_the_configuration_only_and_are_the_same_each_time(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    files = ModelFiles("tiny", directory, "safetensors")
    first, second = (load_model(files, dtype="float32", load_format="dummy") for _ in range(2))
    logits = our_logits(first.model, some_tokens(8))
    assert torch.isfinite(logits).all()
    assert logits.std() > 0
    assert torch.equal(logits, our_logits(second.model, some_tokens(8)))


def test_an_unknown_dtype_is_refused(tiny: TinyModel) -> None:
    with pytest.raises(InvalidConfigError, match="dtype must be auto, float32, bfloat16, float16, got 'int8'"):
        _load(tiny.directory, "int8")

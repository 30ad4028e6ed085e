"""`load_format="dummy"`: a configuration is a model, with random weights and, at need, a tokenizer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cli_helpers import build_cli_model

from mini_vllm import LLM, SamplingParams
from mini_vllm.config import EngineConfig
from mini_vllm.errors import ModelNotFoundError
from mini_vllm.model.architectures import weight_map
from mini_vllm.model.model_files import load_model_config
from mini_vllm.store.model_shapes import find_model, shape_names
from mini_vllm.tokenizer.stand_in import stand_in_tokenizer

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def dummy(model: str | Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(model), load_format="dummy", **options)  # type: ignore[arg-type]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY))
    return path


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    # As their makers give them: https://huggingface.co/TinyLlama, https://huggingface.co/meta-llama
    [("tinyllama-1.1b", 1_100_048_384), ("llama-3.2-1b", 1_235_814_400), ("llama-3-8b", 8_030_261_248)],
)
def test_a_shape_has_as_many_parameters_as_its_model(name: str, num_parameters: int) -> None:
    config = load_model_config(find_model(dummy(name)))
    shapes = [shape for spec in weight_map(config) for shape in spec.shapes]
    assert sum(math.prod(shape) for shape in shapes) == num_parameters


def test_the_help_of_load_format_names_every_shape() -> None:
    assert shape_names() == ["llama-3-8b", "llama-3.2-1b", "tinyllama-1.1b"]
    assert all(name in (EngineConfig.__doc__ or "") for name in shape_names())


def test_a_configuration_alone_runs(config_file: Path) -> None:
    for model in (config_file, config_file.parent):
        llm = LLM(config=dummy(model, num_kv_blocks=16, dtype="float32"))
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        by_text, by_ids = llm.generate(["hi", [5, 299]], params)
        assert len(by_text.outputs[0].token_ids) == len(by_ids.outputs[0].token_ids) == 4
        assert llm.engine.model_name == "tiny"


def test_a_tokenizer_that_lies_beside_the_configuration_is_used(tmp_path: Path) -> None:
    directory = build_cli_model(tmp_path / "whole")
    (directory / "model.safetensors").unlink()
    llm = LLM(config=dummy(directory, num_kv_blocks=16))
    assert llm.engine.tokenizer.vocab_size == 257
    assert llm.engine.chat_template is not None


def test_without_dummy_a_configuration_is_no_model(config_file: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        find_model(EngineConfig(model=str(config_file.parent)))
    with pytest.raises(ModelNotFoundError):
        find_model(EngineConfig(model="llama-3-8b"))


def test_a_configuration_under_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_text(json.dumps(TINY))
    with pytest.raises(ModelNotFoundError, match=r"a configuration is read from a file called config\.json"):
        find_model(dummy(tmp_path / "llama.json"))


@pytest.mark.parametrize("text", ["plain", "déjà vu ✓ 漢字", ""])
def test_the_stand_in_reads_back_what_it_encoded(text: str) -> None:
    tokenizer = stand_in_tokenizer(1000)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(id < 256 for id in ids)


def test_every_id_of_the_stand_in_is_a_token() -> None:
    tokenizer = stand_in_tokenizer(300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([299]) == " [299]"
    assert not tokenizer.special_token_ids and not tokenizer.eos_token_ids
    assert stand_in_tokenizer(128).vocab_size == 128

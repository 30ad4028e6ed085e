"""generation_config.json: which of its values become defaults, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from mini_vllm.errors import ModelLoadError
from mini_vllm.model.model_files import GenerationConfig, load_generation_config
from mini_vllm.store.model_store import ModelFiles


def _load(directory: Path, content: dict[str, Any]) -> GenerationConfig:
    (directory / "generation_config.json").write_text(json.dumps(content))
    return load_generation_config(ModelFiles("tiny", directory, "safetensors"))


def test_an_absent_file_advises_nothing(tmp_path: Path) -> None:
    files = ModelFiles("tiny", tmp_path, "safetensors")
    assert load_generation_config(files) == GenerationConfig({}, frozenset())


def test_the_values_of_qwen_are_read(tmp_path: Path) -> None:
    content = {
        "bos_token_id": 151643,
        "pad_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.05,
        "temperature": 0.1,
        "top_p": 0.001,
        "top_k": 1,
        "transformers_version": "4.37.0",
    }
    found = _load(tmp_path, content)
    assert found.sampling_defaults == {"temperature": 0.1, "top_k": 1, "top_p": 0.001, "repetition_penalty": 1.05}
    assert found.eos_token_ids == frozenset({151645, 151643})


def test_values_count_when_do_sample_is_absent(tmp_path: Path) -> None:
    assert _load(tmp_path, {"temperature": 0.6, "min_p": 0.05}).sampling_defaults == {"temperature": 0.6, "min_p": 0.05}


def test_do_sample_false_means_greedy(tmp_path: Path) -> None:
    content = {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    assert _load(tmp_path, content).sampling_defaults == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_max_new_tokens_is_our_max_tokens(tmp_path: Path) -> None:
    assert _load(tmp_path, {"max_new_tokens": 2048}).sampling_defaults == {"max_tokens": 2048}


def test_null_is_the_same_as_absent(tmp_path: Path) -> None:
    assert _load(tmp_path, {"temperature": None, "eos_token_id": None}) == GenerationConfig({}, frozenset())


@pytest.mark.parametrize(("value", "expected"), [(2, {2}), ([2, 5], {2, 5}), ([], set()), (0, {0})])
def test_end_of_sequence_is_one_id_or_several(tmp_path: Path, value: Any, expected: set[int]) -> None:
    assert _load(tmp_path, {"eos_token_id": value}).eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", -1, True, [2, None], 2.0])
def test_end_of_sequence_that_is_no_id_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"eos_token_id in .*generation_config\.json"):
        _load(tmp_path, {"eos_token_id": value})


@pytest.mark.parametrize(
    "content", [{"temperature": -1}, {"top_p": 2}, {"temperature": "0.5"}, {"top_k": 1.5}, {"min_p": True}]
)
def test_a_value_that_no_request_could_have_is_refused_with_the_name_of_the_file(
    tmp_path: Path, content: dict[str, Any]
) -> None:
    (field,) = content
    with pytest.raises(ModelLoadError, match=rf"{re.escape(str(tmp_path))}.*generation_config\.json.*{field}"):
        _load(tmp_path, content)


def test_what_is_not_applied_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "suppress_tokens": None})
    (record,) = caplog.records
    assert record.message.endswith("sets no_repeat_ngram_size, num_beams, which mini vLLM does not apply")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(content)
    with pytest.raises(ModelLoadError, match=re.escape(str(path))):
        load_generation_config(ModelFiles("tiny", tmp_path, "safetensors"))

"""Directories with vocab.json and merges.txt, and decoders without bytes: ids and texts of the transformers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizer_helpers import varied_texts
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.store.model_store import ModelFiles
from mini_vllm.tokenizer.detokenizer import IncrementalDetokenizer
from mini_vllm.tokenizer.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ["<|endoftext|>", "<s>", "</s>", "<pad>"]
GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
OPT = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """A byte-level BPE with a few hundred merges."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(varied_texts(800, seed=3), trainer)
    return backend


def write(directory: Path, trained: tokenizers.Tokenizer, config: dict[str, Any] | None, **files: Any) -> Path:
    """vocab.json and merges.txt of the trained model, and no tokenizer.json."""
    trained.model.save(str(directory))
    (directory / "merges.txt").write_text("#version: 0.2\n" + (directory / "merges.txt").read_text().split("\n", 1)[1])
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    if config is not None:
        files["tokenizer_config"] = config
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def load(directory: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles(name="small", path=directory, format="safetensors"))


def assert_as_in_transformers(directory: Path) -> tuple[Tokenizer, Any]:
    tokenizer, oracle = load(directory), AutoTokenizer.from_pretrained(directory)
    for text in [*varied_texts(200, seed=4), "a<tool>b<pad>c</s>d<|endoftext|>e <x> f"]:
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == oracle.decode(ids), text
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.special_token_ids >= set(oracle.all_special_ids)
    assert tokenizer.bos_token_id == oracle.bos_token_id
    return tokenizer, oracle


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"model_max_length": 1024},
        GPT2,
        {**GPT2, "add_prefix_space": True},
        OPT,
        {**OPT, "add_bos_token": True},
        {**OPT, "add_bos_token": True, "add_eos_token": True},
        {"tokenizer_class": "CodeGenTokenizer"},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "Qwen2TokenizerFast", "add_bos_token": False, "eos_token": "</s>"},
    ],
    ids=str,
)
def test_ids_and_texts_are_those_of_transformers(
    tmp_path: Path, trained: tokenizers.Tokenizer, config: dict[str, Any] | None
) -> None:
    tokenizer, oracle = assert_as_in_transformers(write(tmp_path, trained, config))
    assert oracle.eos_token_id in tokenizer.eos_token_ids


def test_merges_really_count(tmp_path: Path, trained: tokenizers.Tokenizer) -> None:
    tokenizer = load(write(tmp_path, trained, GPT2))
    assert len(tokenizer.encode("the capital")) < 7


def test_added_tokens_of_older_models(tmp_path: Path, trained: tokenizers.Tokenizer) -> None:
    write(
        tmp_path,
        trained,
        {"tokenizer_class": "GPT2Tokenizer"},
        added_tokens={"<tool>": 700, "<x>": 701},
        special_tokens_map={"pad_token": "<x>", "eos_token": "</s>"},
    )
    tokenizer, _ = assert_as_in_transformers(tmp_path)
    assert tokenizer.encode("<x><tool>") == [701, 700]
    assert tokenizer.decode([701, 700]) == "<tool>"
    assert tokenizer.eos_token_ids == {trained.token_to_id("</s>")}


def test_a_class_that_is_not_known_is_refused(tmp_path: Path, trained: tokenizers.Tokenizer) -> None:
    write(tmp_path, trained, {"tokenizer_class": "CLIPTokenizer"})
    with pytest.raises(UnsupportedModelError, match=r"of a CLIPTokenizer; .*GPT2Tokenizer, .*are known"):
        load(tmp_path)


def test_one_file_without_the_other_is_no_tokenizer(tmp_path: Path, trained: tokenizers.Tokenizer) -> None:
    (write(tmp_path, trained, GPT2) / "merges.txt").unlink()
    with pytest.raises(ModelLoadError, match=r"looked for .* vocab\.json with merges\.txt"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "[", "cannot be read"),
        ("vocab.json", '{"a": "b"}', "must be an object of tokens and their ids"),
        ("merges.txt", "#version: 0.2\na b c\n", "Line 2 of .* is 'a b c', not two tokens"),
        ("merges.txt", "no such\n", "do not fit each other"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(
    tmp_path: Path, trained: tokenizers.Tokenizer, name: str, content: str, message: str
) -> None:
    (write(tmp_path, trained, GPT2) / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


# ---- Metaspace: SentencePiece without bytes, as a tokenizer.json has it ----------------------------------------------


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decodes_and_streams_as_in_the_library(tmp_path: Path, scheme: str) -> None:
    pieces = ["<unk>", "▁", "▁the", "▁cat", "s", "▁▁", "é", "<0x41>"]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    for ids in ([2, 3, 4], [4, 2, 3], [5, 2], [1, 1, 4], [3, 7, 6], []):
        assert tokenizer.decode(ids) == backend.decode(ids)
        stream = IncrementalDetokenizer(tokenizer, [])
        assert "".join([stream.push(token_id) for token_id in ids]) + stream.flush() == backend.decode(ids)
    assert IncrementalDetokenizer(tokenizer, [2]).push(3) == " cat"
    assert tokenizer.token_bytes(3) == b" cat"

"""Model directories with a tokenizer.json: the same ids, special tokens and templates as transformers reads there."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.store.model_store import ModelFiles
from mini_vllm.tokenizer.decoding import byte_level_alphabet
from mini_vllm.tokenizer.tokenizer import REMEMBERED_WORDS, Tokenizer, load_tokenizer

EOS = {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": EOS}


def make_directory(
    directory: Path,
    *,
    config: dict[str, Any] | None = None,
    adds_bos: bool = False,
    decoder: decoders.Decoder | None = None,
    files: dict[str, str] | None = None,
) -> Path:
    """A byte-level tokenizer of single bytes with <s>, </s> and the user's <tool>, as a model directory has it."""
    vocab = {character: i for i, character in enumerate([*byte_level_alphabet(), "<s>", "</s>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config or CONFIG), encoding="utf-8")
    for name, text in (files or {}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def load(directory: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles(name="small", path=directory, format="safetensors"))


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("flag", [None, True, False])
def test_the_post_processor_alone_says_whether_bos_is_added_as_in_transformers(
    tmp_path: Path, adds_bos: bool, flag: bool | None
) -> None:
    config = CONFIG if flag is None else {**CONFIG, "add_bos_token": flag}
    make_directory(tmp_path, config=config, adds_bos=adds_bos)
    tokenizer, oracle = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("hi") == oracle.encode("hi")
    assert (tokenizer.encode("hi")[0] == tokenizer.bos_token_id) == adds_bos


def test_tokens_that_only_the_config_knows_are_added_as_in_transformers(tmp_path: Path) -> None:
    added = {
        "258": {"content": "<tool>", "special": True},  # was not special in tokenizer.json
        "259": {"content": "<think>", "special": False, "normalized": False},
        "260": {"content": "<|end|>", "special": True, "normalized": False},
    }
    config = {**CONFIG, "added_tokens_decoder": added, "pad_token": "<pad>", "additional_special_tokens": ["<extra>"]}
    tokenizer, oracle = load(make_directory(tmp_path, config=config)), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<tool>b<think>c<|end|>d<pad>e<extra>f</s>"
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.vocab_size == len(oracle) == 263
    assert tokenizer.special_token_ids == set(oracle.all_special_ids) | {258, 260}
    assert tokenizer.decode(tokenizer.encode(text)) == oracle.decode(oracle.encode(text), skip_special_tokens=True)


def test_special_tokens_map_names_tokens_in_older_models(tmp_path: Path) -> None:
    names = json.dumps({"bos_token": "<s>", "eos_token": {"content": "<tool>", "lstrip": False}})
    make_directory(tmp_path, config={"tokenizer_class": "X"}, files={"special_tokens_map.json": names})
    tokenizer = load(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<tool>"}
    assert tokenizer.eos_token_ids == {258}
    assert 258 in tokenizer.special_token_ids


def test_padding_and_truncation_of_the_file_are_switched_off(tmp_path: Path) -> None:
    make_directory(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load(tmp_path).encode("hello")) == 5


def test_unknown_ids_decode_to_nothing(tmp_path: Path) -> None:
    tokenizer = load(make_directory(tmp_path))
    assert tokenizer.decode([5000, *tokenizer.encode("a"), 5001]) == "a"
    assert tokenizer.token_bytes(5000) == b""


NAMED = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
TWO_FILES = {"chat_template.jinja": "C", "additional_chat_templates/tool_use.jinja": "D"}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "A"}, {}, {"default": "A"}),
        ({"chat_template": NAMED}, {}, {"default": "A", "rag": "B"}),
        ({}, {"chat_template.jinja": "C"}, {"default": "C"}),
        ({"chat_template": "A"}, {"chat_template.jinja": "C"}, {"default": "C"}),
        ({}, TWO_FILES, {"default": "C", "tool_use": "D"}),
        ({}, {"chat_template.json": '{"chat_template": "E"}'}, {"default": "E"}),
        ({}, {}, {}),
    ],
    ids=["string", "list of named", "jinja file", "jinja file first", "more jinja files", "json file", "none"],
)
def test_chat_templates_are_found_wherever_models_keep_them(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], expected: dict[str, str]
) -> None:
    make_directory(tmp_path, config={**CONFIG, **config}, files=files)
    tokenizer = load(tmp_path)
    assert tokenizer.chat_templates == expected
    assert tokenizer.chat_template == expected.get("default")


def test_a_directory_without_a_tokenizer_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"looked for tokenizer\.json, tokenizer\.model, and vocab\.json with"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "{}"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, content: str) -> None:
    make_directory(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    if content == "{}" and name != "tokenizer.json":
        load(tmp_path)
    else:
        with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
            load(tmp_path)


@pytest.mark.parametrize("added", [[1], {"x": {"content": "a"}}, {"300": {"text": "a"}}, {"300": "a"}], ids=str)
def test_added_tokens_of_a_wrong_form_are_an_error(tmp_path: Path, added: Any) -> None:
    make_directory(tmp_path, config={**CONFIG, "added_tokens_decoder": added})
    with pytest.raises(ModelLoadError, match=r"added tokens in .*tokenizer_config\.json"):
        load(tmp_path)


def test_a_chat_template_of_a_wrong_form_is_an_error(tmp_path: Path) -> None:
    make_directory(tmp_path, config={**CONFIG, "chat_template": [{"nom": "x"}]})
    with pytest.raises(ModelLoadError, match="chat_template"):
        load(tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused_at_the_start(tmp_path: Path) -> None:
    make_directory(tmp_path, decoder=decoders.WordPiece())
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        load(tmp_path)


class Mallinfo(ctypes.Structure):
    """Ten figures, of which the eighth is the bytes in use."""

    _fields_ = (("numbers", ctypes.c_size_t * 10),)


def heap_in_use() -> int:
    """Bytes that the C library has given out."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    return int(mallinfo().numbers[7])


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc before 2.33, or another C library")
def test_a_tokenizer_does_not_grow_with_the_texts_that_it_has_seen(tmp_path: Path) -> None:
    """The library remembers words; a text of one long word was kept for every request, up to ten thousand of them."""
    tokenizer = load(make_directory(tmp_path))

    def encode(first: int, last: int) -> None:
        for number in range(first, last):
            tokenizer.encode("".join("abcdefghij"[int(digit)] for digit in f"{number:06}") * 40)

    encode(0, 3 * REMEMBERED_WORDS)
    before = heap_in_use()
    encode(3 * REMEMBERED_WORDS, 5 * REMEMBERED_WORDS)
    assert heap_in_use() - before < 1_000_000  # 8 kB a word otherwise

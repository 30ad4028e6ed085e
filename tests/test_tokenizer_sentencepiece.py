"""`tokenizer.model` files: the real ones that Mistral's package ships, against the SentencePiece library itself."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from tokenizer_helpers import SENTENCEPIECE_MODELS, varied_texts

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.store.model_store import ModelFiles
from mini_vllm.tokenizer.detokenizer import IncrementalDetokenizer
from mini_vllm.tokenizer.tokenizer import Tokenizer, load_tokenizer

V1 = next(path for path in SENTENCEPIECE_MODELS if path.name.endswith("v1"))  # Mistral 7B: no control tokens but three
V3 = next(path for path in SENTENCEPIECE_MODELS if path.name.endswith("v3"))  # with control and user-defined pieces


def load_model(directory: Path, model: Path | bytes, config: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a directory with this tokenizer.model and nothing else."""
    if isinstance(model, bytes):
        (directory / "tokenizer.model").write_bytes(model)
    else:
        shutil.copy(model, directory / "tokenizer.model")
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(ModelFiles(name="small", path=directory, format="safetensors"))


@pytest.fixture(scope="module", params=[V1, V3], ids=["v1", "v3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """One model here and in the SentencePiece library."""
    model: Path = request.param
    tokenizer = load_model(tmp_path_factory.mktemp("model"), model)
    return tokenizer, sentencepiece.SentencePieceProcessor(str(model))


def test_ids_are_those_of_the_library(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, library = pair
    # the library does not look for control tokens in a text, so texts with one are not compared
    texts = [text for text in varied_texts(400, seed=6) if "<s>" not in text]
    different = [text for text in texts if tokenizer.encode(text, add_special_tokens=False) != library.encode(text)]
    assert different == []


def test_decoded_text_is_that_of_the_library(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, library = pair
    for text in varied_texts(400, seed=7):
        ids = library.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids)


def test_any_ids_decode_as_in_the_library_broken_characters_included(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, library = pair
    draw = random.Random(8)
    bytes_and_text = [*range(library.get_piece_size() - 1000, library.get_piece_size())]
    first_byte = library.piece_to_id("<0x00>")
    for _ in range(400):
        pool = draw.choice([range(first_byte + 0x80, first_byte + 0x100), bytes_and_text])
        ids = [library.piece_to_id("▁a"), *draw.choices(pool, k=draw.randint(1, 8))]
        assert tokenizer.decode(ids) == library.decode(ids)


def test_user_defined_pieces_are_found_whole_and_shown(tmp_path: Path) -> None:
    tokenizer = load_model(tmp_path, V3)
    library = sentencepiece.SentencePieceProcessor(str(V3))
    text = "see [REFERENCE_DOC_1] and[REFERENCE_DOC_19]."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == library.encode(text)
    assert library.piece_to_id("[REFERENCE_DOC_19]") in ids
    assert tokenizer.decode(ids) == text


def test_control_tokens_in_the_text_become_their_ids_and_are_hidden(tmp_path: Path) -> None:
    tokenizer = load_model(tmp_path, V3)
    ids = tokenizer.encode("[INST] Hi [/INST]", add_special_tokens=False)
    assert ids[0] == tokenizer.special_token_id("[INST]")
    assert ids[-1] == tokenizer.special_token_id("[/INST]")
    assert tokenizer.decode(ids).strip() == "Hi"


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [({}, [1], []), ({"add_bos_token": False}, [], []), ({"add_eos_token": True}, [1], [2])],
)
def test_bos_is_added_unless_the_config_says_otherwise(
    tmp_path: Path, config: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = load_model(tmp_path, V1, config)
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*before, *plain, *after]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, {2})


@pytest.mark.parametrize(("legacy", "after_special"), [(True, "▁a"), (False, "a")])
def test_legacy_false_puts_the_space_before_the_whole_text_only(
    tmp_path: Path, legacy: bool, after_special: str
) -> None:
    tokenizer = load_model(tmp_path, V1, {"legacy": legacy})
    library = sentencepiece.SentencePieceProcessor(str(V1))
    assert tokenizer.encode("a</s>a", add_special_tokens=False) == [
        library.piece_to_id("▁a"),
        library.eos_id(),
        library.piece_to_id(after_special),
    ]


def test_a_token_s_own_bytes(tmp_path: Path) -> None:
    tokenizer = load_model(tmp_path, V1)
    library = sentencepiece.SentencePieceProcessor(str(V1))
    assert tokenizer.token_bytes(library.piece_to_id("▁world")) == b" world"
    assert tokenizer.token_bytes(library.piece_to_id("<0xE9>")) == b"\xe9"
    assert tokenizer.token_text(library.piece_to_id("<0xE9>")) == "\ufffd"
    assert tokenizer.token_bytes(library.eos_id()) == b"</s>"


def test_the_first_word_after_a_prompt_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = load_model(tmp_path, V1)
    library = sentencepiece.SentencePieceProcessor(str(V1))
    world = library.piece_to_id("▁world")
    assert IncrementalDetokenizer(tokenizer, tokenizer.encode("Hello")).push(world) == " world"
    assert IncrementalDetokenizer(tokenizer, [library.bos_id()]).push(world) == "world"  # BOS is no text


# ---- models that are trained here ------------------------------------------------------------------------------------


def train(lines: list[str] | None = None, **options: Any) -> bytes:
    """A tiny model that the SentencePiece library trains on a few lines."""
    model = io.BytesIO()
    lines = lines or ["the cat sat on the mat", "a hat is not a cat", "what is that hat on the mat"] * 20
    settings = {"vocab_size": 300, "model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **settings
    )
    return model.getvalue()


def identity(**options: Any) -> bytes:
    return train(normalization_rule_name="identity", remove_extra_whitespaces=False, **options)


def test_a_trained_model_encodes_as_the_library(tmp_path: Path) -> None:
    model = identity(user_defined_symbols=["<x>", "at hat"], control_symbols=["<c>"])
    tokenizer = load_model(tmp_path, model)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in ["the cat sat", "what<x>is <x> that", "  a  hat ", "chat hat hats", "no é 龜", "that hat at hat"]:
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text), text


def test_a_model_without_the_space_before_a_text(tmp_path: Path) -> None:
    model = identity(add_dummy_prefix=False)
    tokenizer = load_model(tmp_path, model)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in ["the cat", " the cat", "é"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [True, False], ids=["bytes", "unknown"])
@pytest.mark.parametrize("spaces", [True, False], ids=["one space", "all spaces"])
def test_a_model_of_either_kind_encodes_and_decodes_as_the_library(
    tmp_path: Path, kind: str, byte_fallback: bool, spaces: bool
) -> None:
    model = train_on_varied_texts(model_type=kind, byte_fallback=byte_fallback, remove_extra_whitespaces=spaces)
    tokenizer, library = load_model(tmp_path, model), sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.vocab_size == library.get_piece_size()
    used: set[int] = set()
    for text in texts_without_special_tokens(300):
        ids = tokenizer.encode(text, add_special_tokens=False)
        used.update(ids)
        assert library.decode(ids) == library.decode(library.encode(text))
        assert score(library, ids) == pytest.approx(score(library, library.encode(text)), abs=1e-3)
        if kind == "bpe":  # two ways to cut a text can be equally likely; two merges cannot
            assert ids == library.encode(text)
        if library.unk_id() not in ids and "▁" not in text:
            assert tokenizer.decode(ids) == library.decode(ids)
    assert (library.unk_id() in used) is not byte_fallback
    assert {library.piece_to_id("<x>"), library.piece_to_id("ats")} <= used


def test_characters_are_replaced_as_the_library_does(tmp_path: Path) -> None:
    model = train_on_varied_texts(model_type="bpe", normalization_rule_name="nmt_nfkc")
    tokenizer, library = load_model(tmp_path, model), sentencepiece.SentencePieceProcessor(model_proto=model)
    texts = [text for text in texts_without_special_tokens(400) if all(map(is_one_character, graphemes(text)))]
    replaced = [text for text in texts if any(character in text for character in "ﬁⅧ½\t\u3000")]
    assert len(texts) > 200 and len(replaced) > 50
    assert [text for text in texts if tokenizer.encode(text, add_special_tokens=False) != library.encode(text)] == []


def texts_without_special_tokens(count: int) -> list[str]:
    """The library does not look for control pieces in a text."""
    extra = ["chat hat hats <x>a<x> <x>", "<0x41> <0x0A>", "that hat at hat"]
    texts = [*extra, *varied_texts(count, seed=9)]
    return [text for text in texts if not any(token in text for token in ("<s>", "</s>", "<unk>"))]


def train_on_varied_texts(**options: Any) -> bytes:
    lines = [text.replace("\n", " ") for text in varied_texts(1500, seed=1) if text.strip()]
    settings = {"normalization_rule_name": "identity", "byte_fallback": True, "character_coverage": 0.98, **options}
    return train(lines=lines, vocab_size=900, user_defined_symbols=["<x>", "ats"], **settings)


def score(library: Any, ids: list[int]) -> float:
    return sum(library.get_score(token_id) for token_id in ids)


def graphemes(text: str) -> list[str]:
    return regex.findall(r"\X", text)


def is_one_character(grapheme: str) -> bool:
    return len(grapheme) == 1


# ---- kinds that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["word", "char"])
def test_words_and_characters_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"of type {kind}; only BPE and unigram"):
        load_model(tmp_path, identity(model_type=kind, byte_fallback=False, use_all_vocab=kind == "word"))


def test_a_mark_after_the_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="does not write a space as the mark before a word"):
        load_model(tmp_path, identity(treat_whitespace_as_suffix=True))


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, V1.read_bytes()[:5000]], ids=["empty", "noise", "cut short"])
def test_a_damaged_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
        load_model(tmp_path, content)

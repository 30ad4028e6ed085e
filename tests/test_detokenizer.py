"""Incremental detokenisation: streamed text adds up to the decoded text, and never shows half a character."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_helpers import HARD_TEXTS, SENTENCEPIECE_MODELS, varied_texts

from mini_vllm.store.model_store import ModelFiles
from mini_vllm.tokenizer.decoding import ByteFallbackStream, ByteLevelStream, byte_level_alphabet
from mini_vllm.tokenizer.detokenizer import IncrementalDetokenizer
from mini_vllm.tokenizer.tokenizer import Tokenizer, load_tokenizer

MULTI_TOKEN_CHARACTERS = ["\U0001fae0", "\U0001f979", "\u9f9c", "世"]


@pytest.fixture(scope="module")
def byte_level(smollm2_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2_files)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("mistral")
    v1 = next(path for path in SENTENCEPIECE_MODELS if path.name.endswith("v1"))
    shutil.copy(v1, directory / "tokenizer.model")
    return load_tokenizer(ModelFiles(name="mistral", path=directory, format="safetensors"))


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    """The string of each output token; the last one has what is left at the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in output]
    return [*pieces[:-1], pieces[-1] + detokenizer.flush()] if pieces else [detokenizer.flush()]


def byte_fallback_id(tokenizer: Tokenizer, byte: int) -> int:
    """The id of "<0xNN>" in Mistral's vocabulary, where the 256 bytes follow <unk>, <s> and </s>."""
    assert tokenizer.token_bytes(3 + byte) == bytes([byte])
    return 3 + byte


# ---- characters of several tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("character", MULTI_TOKEN_CHARACTERS)
def test_the_characters_of_this_file_take_more_than_one_token(byte_level: Tokenizer, character: str) -> None:
    """Else the tests below would pass without testing anything."""
    assert len(byte_level.encode(character)) > 1


def test_no_chunk_has_half_a_character(tokenizer: Tokenizer) -> None:
    text = "ď 🫠🥹龜 世界"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, [], ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids) == text


def test_a_character_comes_whole_with_the_token_that_completes_it(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("龜!")
    assert stream(byte_level, [], ids) == ["", "", "龜", "!"]


def test_a_byte_fallback_character_comes_with_its_last_byte(byte_fallback: Tokenizer) -> None:
    """Also the newline, which is the byte token <0x0A> there: a stop string "\\n" must not wait for one more token."""
    ids = [byte_fallback_id(byte_fallback, byte) for byte in "\n🫠".encode()]
    assert stream(byte_fallback, byte_fallback.encode("a"), ids) == ["\n", "", "", "", "🫠"]


def test_the_end_inside_a_character_shows_what_decode_shows(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a 🫠", add_special_tokens=False)[:-1]
    assert "".join(stream(tokenizer, [], ids)) == tokenizer.decode(ids)
    assert tokenizer.decode(ids).startswith("a \ufffd")


# ---- context of the prompt -------------------------------------------------------------------------------------------


def test_the_space_of_the_first_token_stays(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Hello")
    output = tokenizer.encode("Hello world")[len(prompt) :]
    assert stream(tokenizer, prompt, output) == [" world"]


@pytest.mark.parametrize("text", ["    .", "a , b", " n't", "  two  ", "\n\n has"])
def test_spaces_are_never_cleaned_up(tokenizer: Tokenizer, text: str) -> None:
    prompt = tokenizer.encode("Say:")
    output = tokenizer.encode("Say:" + text)
    assert output[: len(prompt)] == prompt
    assert "".join(stream(tokenizer, prompt, output[len(prompt) :])) == text


def test_a_character_that_the_prompt_began_is_shown_whole_when_it_is_completed(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode("龜")
    assert stream(byte_level, [*byte_level.encode("x"), first], rest) == [*[""] * (len(rest) - 1), "龜"]


def test_a_character_that_the_prompt_began_and_nobody_completed_is_the_prompt_s(tokenizer: Tokenizer) -> None:
    x, y = tokenizer.encode("x"), tokenizer.encode("x y", add_special_tokens=False)[-1:]
    first = tokenizer.encode("x龜", add_special_tokens=False)[1:2]
    assert tokenizer.decode(x + first) == "x\ufffd"
    assert stream(tokenizer, x + first, y) == [" y"]
    assert stream(tokenizer, x + first, []) == [""]


def test_prompt_and_output_as_one_text_have_no_seam(byte_level: Tokenizer) -> None:
    """How echo shows them: one detokenizer with an empty prompt. Its strings join to the text, also in logprobs."""
    ids = byte_level.encode("\n1. Carol has 龜 20")
    pieces = stream(byte_level, [], ids)
    assert "".join(pieces) == "\n1. Carol has 龜 20"
    assert pieces[:4] == ["\n", "1", ".", " Carol"]


# ---- special tokens --------------------------------------------------------------------------------------------------


def test_special_tokens_are_shown_only_when_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Bye<|im_end|>")
    assert stream(byte_level, [], ids) == ["By", "e", ""]
    assert stream(byte_level, [], ids, skip=False) == ["By", "e", "<|im_end|>"]


def test_token_bytes_join_to_the_bytes_of_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a 🫠<|im_end|>")
    assert b"".join(byte_level.token_bytes(token_id) for token_id in ids) == "a 🫠<|im_end|>".encode()


# ---- everything ------------------------------------------------------------------------------------------------------


def test_every_text_cut_anywhere_streams_as_it_decodes(tokenizer: Tokenizer) -> None:
    for text in [*HARD_TEXTS, *varied_texts(80, seed=9)]:
        ids = tokenizer.encode(text)
        for cut in {0, 1, len(ids) // 2, len(ids)}:
            for skip in (True, False):
                check_sum_of_parts(tokenizer, ids[:cut], ids[cut:], skip=skip)


def check_sum_of_parts(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool) -> None:
    """Streamed text is what the whole text has after the prompt's, up to a character that the output completed."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    same = next((i for i, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other), len(before))
    assert set(before[same:]) <= {"\ufffd"}
    assert "".join(stream(tokenizer, prompt, output, skip=skip)) == whole[same:]


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_of_a_byte_level_vocabulary(byte_level: Tokenizer, data: st.DataObject, skip: bool) -> None:
    single_bytes = st.integers(17, 17 + 255)  # where SmolLM2 has the bytes, so that broken characters are common
    any_id = st.one_of(single_bytes, st.integers(0, 49151), st.sampled_from([0, 1, 2, 60000]))
    ids = data.draw(st.lists(any_id, max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    check_sum_of_parts(byte_level, ids[:cut], ids[cut:], skip=skip)
    backend = byte_level._backend
    assert byte_level.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_of_a_byte_fallback_vocabulary(byte_fallback: Tokenizer, data: st.DataObject, skip: bool) -> None:
    any_id = st.one_of(st.integers(3 + 0x80, 3 + 0xFF), st.integers(0, 31999), st.sampled_from([0, 1, 2, 40000]))
    ids = data.draw(st.lists(any_id, max_size=12))
    cut = data.draw(st.integers(0, len(ids)))
    check_sum_of_parts(byte_fallback, ids[:cut], ids[cut:], skip=skip)


@given(
    text=st.text(
        st.characters(max_codepoint=0x1FFFF, exclude_characters="▁", exclude_categories=["Cs", "Cc"]), max_size=20
    )
)
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """(▁ is a space for SentencePiece, and SmolLM2 lacks a few bytes, of control characters and rare planes.)"""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert "".join(stream(tokenizer, [], ids, skip=False)) == text


@given(data=st.binary(max_size=24), sizes=st.lists(st.integers(1, 5), min_size=24, max_size=24))
@settings(max_examples=300, deadline=None)
def test_bytes_become_text_as_in_a_whole_decode_however_they_are_cut(data: bytes, sizes: list[int]) -> None:
    spelling = {byte: character for character, byte in byte_level_alphabet().items()}
    of_tokens = ByteLevelStream()
    text, rest = "", data
    for size in sizes:
        text += of_tokens.push("".join(spelling[byte] for byte in rest[:size]))
        rest = rest[size:]
    assert text + of_tokens.flush() == data.decode("utf-8", errors="replace")


def test_broken_characters_are_counted_as_each_library_counts_them() -> None:
    """E4 B8 is two thirds of 世: one U+FFFD for the `tokenizers` library, two for SentencePiece."""
    byte_level, byte_fallback = ByteLevelStream(), ByteFallbackStream(strip_leading_space=False)
    spelling = {byte: character for character, byte in byte_level_alphabet().items()}
    assert byte_level.push(spelling[0xE4] + spelling[0xB8]) + byte_level.push("a") == "\ufffda"
    assert [byte_fallback.push(token) for token in ["<0xE4>", "<0xB8>", "a"]] == ["", "", "\ufffd\ufffda"]


def test_each_token_is_looked_at_once_and_a_long_prompt_only_at_its_end(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = byte_level.encode("word 龜 " * 500)
    looked_at: list[int] = []
    look_up = byte_level.shown_token

    def spy(token_id: int, *, skip_special_tokens: bool) -> str:
        looked_at.append(token_id)
        return look_up(token_id, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(byte_level, "shown_token", spy)
    detokenizer = IncrementalDetokenizer(byte_level, ids)
    assert len(looked_at) <= 3
    looked_at.clear()
    for token_id in ids:
        detokenizer.push(token_id)
    assert looked_at == ids

"""The tokenizer inside a GGUF file: SmolLM2's real one, and small files written for one case each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter, TokenType
from tokenizer_helpers import SENTENCEPIECE_MODELS, varied_texts
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.store.gguf_file import read_gguf
from mini_vllm.store.model_store import ModelFiles
from mini_vllm.tokenizer import gguf_tokenizer
from mini_vllm.tokenizer.chat_template import load_chat_template
from mini_vllm.tokenizer.decoding import byte_level_alphabet
from mini_vllm.tokenizer.gguf_pre_tokenizers import PRE_TOKENIZATIONS
from mini_vllm.tokenizer.tokenizer import Tokenizer, load_tokenizer

GOLDEN = [
    json.loads(line)
    for line in (Path(__file__).parent / "golden" / "smollm2-135m-instruct.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]


@pytest.fixture(scope="module")
def smollm2(smollm2_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(smollm2_files)


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_files: ModelFiles) -> PreTrainedTokenizerFast:
    """SmolLM2's tokenizer in transformers, by the recipe of its own tokenizer.json: single digits, then GPT-2's words.

    (Transformers' own reader of GGUF files is no oracle here: it takes "smollm" for GPT-2 and joins digits.)
    """
    fields = read_gguf(smollm2_files.path).metadata
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, of_type in zip(tokens, types, strict=True) if of_type == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("row", GOLDEN, ids=range(len(GOLDEN)))
def test_golden_prompts_give_the_golden_ids_and_text(smollm2: Tokenizer, row: dict[str, Any]) -> None:
    if row["kind"] == "chat":
        ids = smollm2.encode(load_chat_template(smollm2).render(row["input"]), add_special_tokens=False)
    else:
        ids = smollm2.encode(row["input"])
    assert ids == row["prompt_token_ids"]
    assert smollm2.decode(row["greedy_token_ids"]) == row["greedy_text"]


def test_500_varied_texts_encode_as_in_transformers(
    smollm2: Tokenizer, smollm2_oracle: PreTrainedTokenizerFast
) -> None:
    texts = varied_texts(500, seed=2)
    assert len(set(texts)) > 450
    different = [text for text in texts if smollm2.encode(text) != smollm2_oracle.encode(text)]
    assert different == []


def test_500_varied_texts_decode_as_in_transformers_and_round_trip(
    smollm2: Tokenizer, smollm2_oracle: PreTrainedTokenizerFast
) -> None:
    for text in varied_texts(500, seed=3):
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        for skip in (True, False):
            expected = smollm2_oracle.decode(ids, skip_special_tokens=skip)
            assert smollm2.decode(ids, skip_special_tokens=skip) == expected


def test_smollm2_is_read_as_its_metadata_says(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == {2}
    assert smollm2.special_token_ids == set(range(17))
    assert smollm2.special_token_id("<|im_end|>") == 2
    assert smollm2.special_token_id("the") is None
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False) == [6004]  # no BOS
    assert smollm2.encode("<|im_start|>") == [1]


def test_lone_surrogates_become_replacement_characters(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode("a\ud83d b\udc00")) == "a\ufffd b\ufffd"


# ---- files written for one case each ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilesInOneFolder(ModelFiles):
    """Model files whose converted data lies beside them, not in the user's store."""

    @property
    def cache_dir(self) -> Path:
        return self.path.parent / "converted"


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of bytes, a few merges and four added tokens; a change to None leaves a field out."""
    tokens = [*byte_level_alphabet(), "he", "ll", "hell", "hello", "Ġh", "<s>", "</s>", "<eot>", "<tool>"]
    kinds = [TokenType.NORMAL] * (len(tokens) - 4) + [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ h"],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        "eot_token_id": tokens.index("<eot>"),
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def write_gguf(path: Path, fields: dict[str, Any], *, templates: Any = None) -> ModelFiles:
    """A GGUF file without tensors whose tokenizer metadata is `fields`."""
    writer = GGUFWriter(path, "llama")
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if templates is not None:
        writer.add_chat_template(templates)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return FilesInOneFolder(name="small", path=path, format="gguf")


@pytest.mark.parametrize("field", ["model", "pre", "tokens", "token_type", "merges"])
def test_a_missing_field_is_an_error_that_names_it(tmp_path: Path, field: str) -> None:
    files = write_gguf(tmp_path / "m.gguf", byte_level_metadata(**{field: None}))
    with pytest.raises(ModelLoadError, match=rf"has no tokenizer\.ggml\.{field}"):
        load_tokenizer(files)


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", byte_level_metadata(pre="deepseek-v9"))
    with pytest.raises(UnsupportedModelError, match=r"'deepseek-v9'; supported are default, gpt-2, llama-bpe"):
        load_tokenizer(files)


def test_an_unknown_tokenizer_model_is_refused_by_name(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", byte_level_metadata(model="t5"))
    with pytest.raises(UnsupportedModelError, match=r"of the kind 't5'"):
        load_tokenizer(files)


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    files.path.write_bytes(files.path.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match=r"damaged or cut short"):
        load_tokenizer(files)


def test_a_special_id_outside_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", byte_level_metadata(eos_token_id=9999))
    with pytest.raises(ModelLoadError, match=r"eos_token_id 9999, but its tokenizer has 265 tokens"):
        load_tokenizer(files)


def test_added_tokens_are_found_whole_and_only_control_tokens_are_hidden(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level_metadata()))
    ids = tokenizer.encode("hello<tool> hello</s>")
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["hello", "<tool>", " ", "hello", "</s>"]
    assert tokenizer.decode(ids) == "hello<tool> hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello<tool> hello</s>"


def test_every_end_token_of_the_metadata_ends_a_sequence(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level_metadata()))
    assert tokenizer.eos_token_ids == {tokenizer.special_token_id("</s>"), tokenizer.special_token_id("<eot>")}


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "added"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_as_the_metadata_says(tmp_path: Path, pre: str, add_bos_token: bool | None, added: bool) -> None:
    fields = byte_level_metadata(pre=pre, add_bos_token=add_bos_token)
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", fields))
    (hello,) = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == ([tokenizer.bos_token_id, hello] if added else [hello])


def test_chat_templates_come_from_the_metadata(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level_metadata(), templates=templates))
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert tokenizer.chat_template == "plain"


def test_a_file_without_a_chat_template_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level_metadata())).chat_template is None


def test_the_conversion_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_gguf(tmp_path / "m.gguf", byte_level_metadata())
    first = load_tokenizer(files)
    monkeypatch.setattr(gguf_tokenizer, "_build_backend", lambda metadata: pytest.fail("converted a second time"))
    assert load_tokenizer(files).encode("hello there") == first.encode("hello there")


def test_a_file_that_changed_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINI_VLLM_HOME", str(tmp_path / "home"))
    files = ModelFiles(name="small", path=tmp_path / "m.gguf", format="gguf")
    write_gguf(files.path, byte_level_metadata())
    assert len(load_tokenizer(files).encode("hello")) == 1
    write_gguf(files.path, byte_level_metadata(add_bos_token=True))
    assert len(load_tokenizer(files).encode("hello")) == 2


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", byte_level_metadata(chat_template=None, merges=["h q9"]))
    with pytest.raises(ModelLoadError, match="merges"):
        load_tokenizer(files)
    write_gguf(files.path, byte_level_metadata())
    assert load_tokenizer(files).encode("hello") != []


LLAMA3_WORDS = {
    "gpt-2": ["in", " 1984", ",", " It", "'", "S", " 龜", "\n\n", " x"],
    "smollm": ["in", " ", "1", "9", "8", "4", ",", " It", "'", "S", " 龜", "\n\n", " x"],
    "llama-bpe": ["in", " ", "198", "4", ",", " It", "'S", " 龜", "\n\n", " x"],
    "qwen2": ["in", " ", "1", "9", "8", "4", ",", " It", "'S", " 龜", "\n\n", " x"],
    "tekken": ["in", " ", "1", "9", "8", "4", ",", " It", "'S", " 龜", "\n\n", " x"],
    "default": ["in", " ", "198", "4", ",", " It", "'", "S", " 龜", "\n\n", " x"],
}


@pytest.mark.parametrize("name", LLAMA3_WORDS)
def test_each_pre_tokenizer_cuts_as_its_model_does(name: str) -> None:
    text = "in 1984, It'S 龜\n\n x"
    cut = PRE_TOKENIZATIONS[name].pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == LLAMA3_WORDS[name]


def test_pre_tokenizers_equal_those_that_other_libraries_ship() -> None:
    """GPT-2's from `tokenizers`, SmolLM2's recipe, Qwen2's from transformers, Tekken's pattern from mistral-common."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tekken = json.loads(next(SENTENCEPIECE_MODELS[0].parent.glob("tekken_240911.json")).read_text(encoding="utf-8"))
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    oracles = {
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "qwen2": by_pattern(PRETOKENIZE_REGEX),
        "tekken": by_pattern(tekken["config"]["pattern"]),
    }
    for name, oracle in oracles.items():
        ours = PRE_TOKENIZATIONS[name].pre_tokenizer()
        for text in varied_texts(300, seed=4):
            assert ours.pre_tokenize_str(text) == oracle.pre_tokenize_str(text), (name, text)


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", byte_level_metadata(pre="qwen2")))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


# ---- GGUF's "llama" kind, against the SentencePiece library ----------------------------------------------------------


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Mistral's SentencePiece model as GGUF metadata, and in the SentencePiece library."""
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(str(SENTENCEPIECE_MODELS[0]))
    ids = range(library.get_piece_size())

    def type_of(token_id: int) -> TokenType:
        if library.is_byte(token_id):
            return TokenType.BYTE
        if library.is_unknown(token_id):
            return TokenType.UNKNOWN
        return TokenType.CONTROL if library.is_control(token_id) else TokenType.NORMAL

    fields = {
        "model": "llama",
        "tokens": [library.id_to_piece(token_id) for token_id in ids],
        "scores": [library.get_score(token_id) for token_id in ids],
        "token_type": [type_of(token_id) for token_id in ids],
        "bos_token_id": library.bos_id(),
        "eos_token_id": library.eos_id(),
    }
    path = tmp_path_factory.mktemp("mistral") / "m.gguf"
    return load_tokenizer(write_gguf(path, fields)), library


def test_a_sentencepiece_vocabulary_without_merges_encodes_as_the_library(mistral: tuple[Tokenizer, Any]) -> None:
    tokenizer, library = mistral
    texts = [text for text in varied_texts(300, seed=5) if "<s>" not in text]
    different = [text for text in texts if tokenizer.encode(text, add_special_tokens=False) != library.encode(text)]
    assert different == []


def test_a_sentencepiece_vocabulary_adds_bos_unless_it_says_otherwise(mistral: tuple[Tokenizer, Any]) -> None:
    tokenizer, library = mistral
    assert tokenizer.encode("Hello") == [library.bos_id(), *library.encode("Hello")]


def test_missing_scores_are_an_error_that_names_them(tmp_path: Path) -> None:
    fields = byte_level_metadata(model="llama", scores=None)
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.ggml\.scores"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", fields))

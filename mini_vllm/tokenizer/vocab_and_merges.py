"""Byte-level BPE from `vocab.json` and `merges.txt`, as GPT-2, OPT and older models have it.

Where it stands: the source of a tokenizer when a directory has neither `tokenizer.json` nor `tokenizer.model`.

    vocab.json     {"Ġworld": 995, ...}
    merges.txt     "Ġ w", "or ld", ... first come, first merged; a first line "#version: 0.2" is a comment

The two files do not say how text is cut into words before merging. The class that `tokenizer_config.json` names does:

    GPT2Tokenizer, CodeGenTokenizer   "in 1984" -> "in" " 1984"
    Qwen2Tokenizer                    "in 1984" -> "in" " " "1" "9" "8" "4", after Unicode normal form C

What always holds: the ids are those that the transformers library gives for the same directory; a class that is not
known here is refused, since a wrong cut gives ids that look right and are not.

In vLLM: `vllm/tokenizers/hf.py`, which leaves this to `transformers.AutoTokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.json_text import parse_json
from mini_vllm.tokenizer.gguf_pre_tokenizers import pre_tokenization
from mini_vllm.tokenizer.sentencepiece_backend import around_text

_END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class _TokenizerClass:
    """What a class of the transformers library does by itself.

    Args:
        cut: the name of its way to cut (`gguf_pre_tokenizers.py`).
        defaults: the special tokens that are "<|endoftext|>" unless the configuration says otherwise.
    """

    cut: str
    defaults: tuple[str, ...]


_GPT2 = _TokenizerClass("gpt-2", ("bos_token", "eos_token", "unk_token"))
_CLASSES: Final[Mapping[str, _TokenizerClass]] = MappingProxyType(
    {
        "GPT2Tokenizer": _GPT2,
        "CodeGenTokenizer": _GPT2,
        "Qwen2Tokenizer": _TokenizerClass("qwen2", ("eos_token", "pad_token")),
    }
)


@dataclass(frozen=True)
class VocabAndMerges:
    """The two files as a `tokenizers` object, and the special tokens that the class has by itself."""

    backend: Backend
    special_tokens: Mapping[str, str]


def has_vocab_and_merges(directory: Path) -> bool:
    """Whether both files are there."""
    return (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file()


def read_vocab_and_merges(
    directory: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> VocabAndMerges:
    """Read the two files.

    Args:
        directory: where they are.
        config: the parsed `tokenizer_config.json`, or {}. `tokenizer_class`, `add_prefix_space`, `add_bos_token` and
            `add_eos_token` count.
        special_tokens: names and texts that the configuration gives.

    Raises:
        ModelLoadError: a file is damaged.
        UnsupportedModelError: a tokenizer class that is not known here.
    """
    kind = _kind(config, directory)
    vocab = _read_vocab(directory / "vocab.json")
    try:
        backend = Backend(models.BPE(vocab=vocab, merges=_read_merges(directory / "merges.txt")))
    except Exception as error:  # the library raises bare Exception for a merge of tokens that are not there
        raise ModelLoadError(f"merges.txt and vocab.json in {directory} do not fit each other ({error}).") from error
    _set_spelling(backend, kind, add_prefix_space=bool(config.get("add_prefix_space", False)))
    defaults = {name: _END_OF_TEXT for name in kind.defaults if _END_OF_TEXT in vocab and name not in config}
    named = {**defaults, **special_tokens}
    before = _added_around(named, vocab, "bos_token") if config.get("add_bos_token") else {}
    after = _added_around(named, vocab, "eos_token") if config.get("add_eos_token") else {}
    pieces = {token_id: text for text, token_id in (*before.items(), *after.items())}
    backend.post_processor = around_text(pieces, *(next(iter(side.values()), None) for side in (before, after)))
    return VocabAndMerges(backend, defaults)


def _kind(config: Mapping[str, Any], directory: Path) -> _TokenizerClass:
    name = config.get("tokenizer_class")
    if name is None:
        return _CLASSES["Qwen2Tokenizer" if _model_type(directory).startswith("qwen") else "GPT2Tokenizer"]
    known = _CLASSES.get(str(name).removesuffix("Fast"))
    if known is None:
        raise UnsupportedModelError(
            f"{directory} has vocab.json and merges.txt of a {name}; without a tokenizer.json only "
            f"{', '.join(_CLASSES)} are known. Make one with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    return known


def _model_type(directory: Path) -> str:
    """`model_type` of the model's configuration, or '' where there is none to be read."""
    try:
        return str(parse_json((directory / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""  # whoever needs the configuration itself says what is wrong with it


def _set_spelling(backend: Backend, kind: _TokenizerClass, *, add_prefix_space: bool) -> None:
    if kind is _GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
    else:
        way = pre_tokenization(kind.cut)
        backend.pre_tokenizer = way.pre_tokenizer()
        if way.composes:
            backend.normalizer = way.normalizer()
    backend.decoder = decoders.ByteLevel()


def _added_around(named: Mapping[str, str], vocab: Mapping[str, int], name: str) -> dict[str, int]:
    text = named.get(name, "")
    return {text: vocab[text]} if text in vocab else {}


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        vocab = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}). Download it again.") from error
    if not isinstance(vocab, dict) or not all(type(token_id) is int and token_id >= 0 for token_id in vocab.values()):
        raise ModelLoadError(f"{path} must be an object of tokens and their ids. Download it again.")
    return vocab


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        # Lines end in \n alone: other characters that Python takes for line ends are tokens.
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}). Download it again.") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise ModelLoadError(f"Line {number} of {path} is {line!r}, not two tokens. Download it again.")
        merges.append((left, right))
    return merges

"""The tokenizer inside a GGUF file, written out once as the files that a directory would have.

Where it stands: below `load_tokenizer`. The vocabulary, merges, types and special ids are metadata of the GGUF file:

    tokenizer.ggml.model "gpt2"    byte-level BPE: tokens, merges, and `pre`, the name of how text is cut into words
    tokenizer.ggml.model "llama"   SentencePiece BPE: tokens and scores
    tokenizer.ggml.token_type      normal, unknown, control, user-defined, unused, byte (`PieceType`)

They become `tokenizer.json` and `tokenizer_config.json` under the model's cache directory, which are then read like
those of any model: that is faster than 98,000 strings of metadata, and anyone can look at what was made of them.

What always holds: a field that is missing stops the load and is named; nothing is guessed in its place, except where
llama.cpp, whose format this is, defines what its absence means (`add_bos_token`, `add_space_prefix`). The two files
appear together or not at all.

In vLLM: `vllm/model_executor/model_loader/gguf_loader.py` asks for a Hugging Face tokenizer instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.store.atomic_write import atomic_directory
from mini_vllm.store.gguf_file import read_gguf
from mini_vllm.tokenizer.gguf_pre_tokenizers import pre_tokenization
from mini_vllm.tokenizer.sentencepiece_backend import around_text, build_sentencepiece_backend
from mini_vllm.tokenizer.sentencepiece_vocabulary import PieceType, SentencePieceVocabulary

_FOLDER = "tokenizer-1"  # the number goes up when the conversion changes, so that old results are not read
_SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDING_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of sequence, of turn, of message


def converted_tokenizer(gguf: Path, cache_dir: Path) -> Path:
    """A directory with the tokenizer of a GGUF file, converted now if it was not before.

    Args:
        gguf: the file.
        cache_dir: the model's own place for converted data; another one when the file changes.

    Raises:
        ModelLoadError: the file is damaged or lacks a field.
        UnsupportedModelError: a tokenizer model or pre-tokenizer that is not implemented.
    """
    directory = cache_dir / _FOLDER
    if not directory.is_dir():
        metadata = _TokenizerMetadata(gguf)
        backend, config = _build_backend(metadata), _build_config(metadata)
        with atomic_directory(directory) as unfinished:
            backend.save(str(unfinished / "tokenizer.json"), pretty=False)
            text = json.dumps(config, ensure_ascii=False, indent=1)
            (unfinished / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return directory


class _TokenizerMetadata:
    """The `tokenizer.*` fields of a GGUF file, with errors that name what is missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields = read_gguf(path).metadata

    def get(self, name: str, default: Any = None) -> Any:
        """A field of `tokenizer.ggml`, or the default."""
        return self._fields.get(f"tokenizer.ggml.{name}", default)

    def require(self, name: str) -> Any:
        """A field of `tokenizer.ggml` that has to be there."""
        value = self.get(name)
        if value is None:
            raise ModelLoadError(
                f"{self.path} has no tokenizer.ggml.{name}, so its tokenizer cannot be built. Get a newer conversion "
                "of the model, or use its safetensors files."
            )
        return value

    def tokens(self) -> list[str]:
        """The texts of all ids."""
        tokens: list[str] = self.require("tokens")
        return tokens

    def types(self) -> list[int]:
        """The `PieceType` of all ids."""
        types: list[int] = self.require("token_type")
        if len(types) != len(self.tokens()):
            raise ModelLoadError(
                f"{self.path} has {len(self.tokens())} tokens but {len(types)} token types. Download it again."
            )
        return types

    def token_id(self, name: str) -> int | None:
        """A special id such as "bos_token_id", or None if the file has none."""
        token_id = self.get(name)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens()):
            raise ModelLoadError(
                f"{self.path} says {name} {token_id}, but its tokenizer has {len(self.tokens())} tokens. "
                "Download it again."
            )
        return int(token_id)

    def added(self, *, adds_bos: bool) -> tuple[int | None, int | None]:
        """BOS and EOS, each if it is added around a text; `adds_bos` counts when the file does not say."""
        bos = self.token_id("bos_token_id") if self.get("add_bos_token", adds_bos) else None
        eos = self.token_id("eos_token_id") if self.get("add_eos_token", False) else None
        return bos, eos

    def chat_templates(self) -> list[dict[str, str]]:
        """All chat templates as {"name", "template"}; `tokenizer.chat_template.NAME` are beside the usual one."""
        key = "tokenizer.chat_template"
        named = {
            name.removeprefix(f"{key}."): text for name, text in self._fields.items() if name.startswith(f"{key}.")
        }
        if key in self._fields:
            named["default"] = self._fields[key]
        return [{"name": name, "template": template} for name, template in named.items()]


def _build_backend(metadata: _TokenizerMetadata) -> Backend:
    model = metadata.require("model")
    if model == "gpt2":
        return _byte_level_backend(metadata)
    if model == "llama":
        return _sentencepiece_backend(metadata)
    raise UnsupportedModelError(
        f"The tokenizer of {metadata.path} is of the kind {model!r} (tokenizer.ggml.model); supported are 'gpt2' "
        "(byte-level BPE) and 'llama' (SentencePiece BPE)."
    )


def _byte_level_backend(metadata: _TokenizerMetadata) -> Backend:
    cut = pre_tokenization(metadata.require("pre"))
    tokens = metadata.tokens()
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.require("merges")]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ModelLoadError(f"{metadata.path} has {len(tokens) - len(ids)} tokens twice. Get another conversion.")
    try:
        backend = Backend(models.BPE(vocab=ids, merges=merges, ignore_merges=cut.ignore_merges))
    except Exception as error:  # the library raises bare Exception for a merge of tokens that are not there
        raise ModelLoadError(f"The merges of {metadata.path} do not fit its tokens ({error}).") from error
    if cut.composes:
        backend.normalizer = cut.normalizer()
    backend.pre_tokenizer = cut.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(tokens, metadata.types()))
    backend.post_processor = around_text(tokens, *metadata.added(adds_bos=cut.adds_bos))
    return backend


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Tokens that are found whole in a text: control tokens, which are not shown, and user-defined ones, which are."""
    added = {PieceType.CONTROL: True, PieceType.UNKNOWN: True, PieceType.USER_DEFINED: False}
    return [
        AddedToken(token, special=added[PieceType(of_type)], normalized=False)
        for token, of_type in zip(tokens, types, strict=True)
        if of_type in added
    ]


def _sentencepiece_backend(metadata: _TokenizerMetadata) -> Backend:
    bos_token_id, eos_token_id = metadata.added(adds_bos=True)
    types = metadata.types()
    return build_sentencepiece_backend(
        SentencePieceVocabulary(
            # the converters of GGUF files write the ▁ of user-defined tokens as a space
            pieces=[
                token.replace(" ", "▁") if of_type == PieceType.USER_DEFINED else token
                for token, of_type in zip(metadata.tokens(), types, strict=True)
            ],
            scores=metadata.require("scores"),
            types=types,
            space_before="every" if metadata.get("add_space_prefix", True) else "never",
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
        )
    )


def _build_config(metadata: _TokenizerMetadata) -> dict[str, Any]:
    """What `tokenizer_config.json` says of such a model; "eos_token_ids" is ours, for files with more than one."""
    tokens = metadata.tokens()
    special = {name: metadata.token_id(key) for name, key in _SPECIAL_TOKEN_KEYS.items()}
    ending = {metadata.token_id(key) for key in _ENDING_KEYS} - {None}
    config: dict[str, Any] = {name: tokens[token_id] for name, token_id in special.items() if token_id is not None}
    config["eos_token_ids"] = sorted(token_id for token_id in ending if token_id is not None)
    if templates := metadata.chat_templates():
        config["chat_template"] = templates
    return config

"""The tokenizer: text to token ids and back, on the `tokenizers` library.

Where it stands: the first and the last step of a request. `encode` makes the prompt's ids, `IncrementalDetokenizer`
turns sampled ids into streamed text, and `decode` is what that text adds up to.

    tokenizer.json | tokenizer.model | GGUF metadata  ->  TokenizerParts  ->  Tokenizer

What always holds: no text is cleaned up (a space before a full stop stays); lone surrogates, which are no text, become
U+FFFD before encoding; ids that the vocabulary does not have (rows a model only has as padding) decode to nothing.

In vLLM: `vllm/tokenizers/` and `transformers.PreTrainedTokenizerFast`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tokenizers import models

from mini_vllm.store.model_store import ModelFiles
from mini_vllm.tokenizer.decoding import REPLACEMENT, TextStream, decoding_rules, new_text_stream
from mini_vllm.tokenizer.gguf_tokenizer import converted_tokenizer
from mini_vllm.tokenizer.tokenizer_files import TokenizerParts, decoder_section, read_tokenizer_directory

# Words that the library remembers with their tokens. Its own 10,000 make it no faster, and grow to 30 MB where a model
# does not cut texts into words, as each text of up to 256 bytes then counts as one.
REMEMBERED_WORDS = 2000
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer of a model.

    A directory is read as it is. The metadata of a GGUF file is converted once, into `files.cache_dir`, and read from
    there afterwards.

    Raises:
        ModelLoadError: no tokenizer file, a damaged one, or a GGUF without a field that is needed.
        UnsupportedModelError: a kind of tokenizer that is not implemented.
    """
    if files.format == "gguf":
        return Tokenizer(read_tokenizer_directory(converted_tokenizer(files.path, files.cache_dir)))
    return Tokenizer(read_tokenizer_directory(files.path))


class Tokenizer:
    """One model's tokenizer.

    Args:
        parts: what the model's files say (see `tokenizer_files.py`).

    Attributes:
        vocab_size: ids run from 0 to vocab_size - 1, added tokens included.
        bos_token_id: the id that begins a sequence, or None.
        eos_token_ids: the ids that end one, as far as the tokenizer's own files say.
        special_token_ids: ids whose text is not shown to users (`skip_special_tokens`).
        special_tokens: their names, as chat templates see them: {"bos_token": "<s>", ...}.
        chat_templates: Jinja sources by name; the usual one is named "default".
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        if isinstance(self._backend.model, (models.BPE, models.Unigram)):  # the others remember none
            self._backend.model._resize_cache(REMEMBERED_WORDS)
        self._rules = decoding_rules(decoder_section(parts.backend))
        self._own_bytes = self.new_text_stream().token_bytes
        self.vocab_size: int = parts.backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(parts.special_tokens))
        self.chat_templates: Mapping[str, str] = MappingProxyType(dict(parts.chat_templates))
        self._added_tokens = {added.content: id for id, added in self._backend.get_added_tokens_decoder().items()}
        self.special_token_ids: frozenset[int] = frozenset(
            id for id, added in self._backend.get_added_tokens_decoder().items() if added.special
        )
        self.bos_token_id: int | None = self._named_token_id("bos_token")
        eos_token_id = self._named_token_id("eos_token")
        self.eos_token_ids: frozenset[int] = parts.eos_token_ids | (set() if eos_token_id is None else {eos_token_id})

    @property
    def chat_template(self) -> str | None:
        """The model's usual chat template, or None."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text become their ids.

        Args:
            text: any string.
            add_special_tokens: add what the tokenizer adds by itself, usually BOS or nothing. A rendered chat template
                has its own, so it is encoded without.
        """
        text = _LONE_SURROGATE.sub(REPLACEMENT, text)
        # A batch of one, since `encode` keeps Python's lock, and no other thread would run while it takes its time.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; never cleaned up.

        The same stream as for incremental text, so the two agree: with byte-level BPE this equals the `tokenizers`
        library; with byte fallback it equals SentencePiece, which keeps the whole characters of a row of bytes that
        ends in half a one (the `tokenizers` library turns all of the row into U+FFFD).
        """
        stream = self.new_text_stream()
        tokens = (self.shown_token(id, skip_special_tokens=skip_special_tokens) for id in token_ids)
        return "".join([stream.push(token) for token in tokens if token]) + stream.flush()

    def shown_token(self, token_id: int, *, skip_special_tokens: bool) -> str:
        """The token's string in the vocabulary's spelling, or '' for one that is not shown."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return ""
        return self._backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, special tokens included; b'' for an id that the vocabulary does not have."""
        return self._own_bytes(self.shown_token(token_id, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """The token's own bytes as text; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def longest_token_length(self) -> int:
        """Characters of text that one token stands for at most."""
        return max(map(len, self._backend.get_vocab()))

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token whose text this is, or None (so a stop string can become a stop id)."""
        token_id = self._added_tokens.get(text)
        return token_id if token_id in self.special_token_ids else None

    def new_text_stream(self) -> TextStream:
        """An empty stream with this tokenizer's spelling."""
        return new_text_stream(self._rules)

    def _named_token_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

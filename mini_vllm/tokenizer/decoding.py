"""From token strings to text: the three ways that decoder-only models use, as incremental streams.

Where it stands: below `Tokenizer` (which asks for a token's bytes) and `IncrementalDetokenizer` (which pushes one token
after another). A token of a vocabulary is a string in one of three spellings:

    byte-level BPE           "Ġworld"   each character stands for one byte (GPT-2's table); a token may end inside a
    (GPT-2, Llama 3, Qwen)              character: 龜 is the three bytes of "é¾" + "ľ"
    byte fallback            "▁world"   real text with ▁ for a space; a character that is not in the vocabulary is
    (Llama 2, Mistral)                  spelled "<0xE9>" "<0xBE>" "<0x9C>"
    metaspace (XGLM)         "▁world"   the same without bytes: such a character is the unknown token

What always holds: the strings that a stream returns, joined, are the text of all tokens pushed; a character is returned
whole, with the token that completes it; the time is linear in the number of tokens.

Bytes that are no UTF-8 become U+FFFD as the model's own library has it: byte-level BPE (the `tokenizers` library) shows
one U+FFFD for each maximal broken piece of a character, byte fallback (SentencePiece) one for each byte.

In vLLM: `vllm/tokenizers/detokenizer_utils.py`, which decodes a window of tokens twice instead.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

from mini_vllm.errors import UnsupportedModelError

REPLACEMENT = "\ufffd"
SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True)
class DecodingRules:
    """How a vocabulary spells text.

    Args:
        scheme: see the head of this file.
        strip_leading_space: the first space of the whole text is not text (SentencePiece puts one before every text);
            with metaspace, no space of the first token is.
    """

    scheme: Literal["byte_level", "byte_fallback", "metaspace"]
    strip_leading_space: bool = False


def decoding_rules(decoder: Mapping[str, Any] | None) -> DecodingRules:
    """Read the rules from the "decoder" entry of a `tokenizer.json`.

    Raises:
        UnsupportedModelError: for any decoder that is not one of the two, because streaming text that differs from the
            model's own would be silent damage.
    """
    match _flatten(decoder):
        case [{"type": "ByteLevel"}]:
            return DecodingRules("byte_level")
        case [{"type": "Metaspace", "replacement": "▁", **rest}]:
            return DecodingRules("metaspace", strip_leading_space=rest.get("prepend_scheme", "always") != "never")
        case [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *others,
        ]:
            match others:
                case []:
                    return DecodingRules("byte_fallback")
                case [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                    return DecodingRules("byte_fallback", strip_leading_space=True)
    raise UnsupportedModelError(
        f"The tokenizer's decoder is {decoder!r}; mini vLLM can stream the text of byte-level BPE (ByteLevel), of byte "
        "fallback (Replace, ByteFallback, Fuse, Strip) and of Metaspace only."
    )


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table from characters to bytes (Radford et al. 2019).

    Bytes that print stand for themselves; the others (controls, the space, 0x7F-0xA0, 0xAD) take the characters from
    U+0100 on, in order: the space, 0x20, is the 33rd of them and becomes U+0120 "Ġ".
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF: Final[Mapping[str, int]] = MappingProxyType(byte_level_alphabet())


class TextStream(Protocol):
    """Turns token strings into text, one at a time."""

    def token_bytes(self, token: str) -> bytes:
        """The token's own bytes, whatever stands before it."""

    def push(self, token: str) -> str:
        """Text that is final with this token; '' while a character is incomplete."""

    def flush(self) -> str:
        """The rest, when no token follows: an unfinished character as U+FFFD."""

    def resume(self, tokens_backwards: Iterable[str]) -> None:
        """Continue after a prompt, whose tokens come last one first and are read only as far back as needed.

        The prompt's text was shown by whoever wrote it, so it is never returned. A character that the prompt leaves
        unfinished is returned whole if the output completes it; if not, its U+FFFD belongs to the prompt.
        """


def new_text_stream(rules: DecodingRules) -> TextStream:
    """A stream that has seen no token."""
    if rules.scheme == "byte_level":
        return ByteLevelStream()
    if rules.scheme == "metaspace":
        return MetaspaceStream(strip_leading_space=rules.strip_leading_space)
    return ByteFallbackStream(strip_leading_space=rules.strip_leading_space)


class ByteLevelStream:
    """Text of byte-level BPE: all tokens are bytes, in one row."""

    def __init__(self) -> None:
        self._characters = _CharacterStream(errors="replace")

    def token_bytes(self, token: str) -> bytes:
        """The token's own bytes; a token with a character outside the alphabet (added tokens) is literal text."""
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:
            return token.encode("utf-8")

    def push(self, token: str) -> str:
        """Text that is final with this token."""
        return self._characters.feed(self.token_bytes(token))

    def flush(self) -> str:
        """The rest, when no token follows."""
        return self._characters.finish()

    def resume(self, tokens_backwards: Iterable[str]) -> None:
        """Continue after a prompt: its last three bytes decide, as no character is unfinished for longer."""
        tail = b""
        for token in tokens_backwards:
            tail = self.token_bytes(token) + tail
            if len(tail) >= 3:
                break
        self._characters.resume(tail[-3:])


class ByteFallbackStream:
    """Text of SentencePiece BPE: a token is a byte or text, and text ends a row of bytes."""

    def __init__(self, *, strip_leading_space: bool) -> None:
        self._at_start = strip_leading_space
        self._characters = _CharacterStream(errors="surrogateescape")

    def token_bytes(self, token: str) -> bytes:
        """The token's own bytes: those of its text, or the one that "<0xNN>" names."""
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(SPACE_MARK, " ").encode("utf-8")

    def push(self, token: str) -> str:
        """Text that is final with this token."""
        if _BYTE_TOKEN.fullmatch(token):
            return self._without_leading_space(self._characters.feed(self.token_bytes(token)))
        return self._without_leading_space(self._characters.finish() + token.replace(SPACE_MARK, " "))

    def flush(self) -> str:
        """The rest, when no token follows."""
        return self._without_leading_space(self._characters.finish())

    def resume(self, tokens_backwards: Iterable[str]) -> None:
        """Continue after a prompt: its last row of bytes decides, and whether it has any text at all."""
        tail = b""
        for token in tokens_backwards:
            if token:
                self._at_start = False
            if not _BYTE_TOKEN.fullmatch(token) or len(tail) == 3:
                break
            tail = self.token_bytes(token) + tail
        self._characters.resume(tail)

    def _without_leading_space(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")


class MetaspaceStream:
    """Text of SentencePiece without bytes: a token is whole text, so nothing ever waits."""

    def __init__(self, *, strip_leading_space: bool) -> None:
        self._at_start = strip_leading_space

    def token_bytes(self, token: str) -> bytes:
        """The token's own bytes."""
        return token.replace(SPACE_MARK, " ").encode("utf-8")

    def push(self, token: str) -> str:
        """The token's text."""
        space = "" if self._at_start else " "
        self._at_start = False
        return token.replace(SPACE_MARK, space)

    def flush(self) -> str:
        """Nothing waits."""
        return ""

    def resume(self, tokens_backwards: Iterable[str]) -> None:
        """Continue after a prompt: all that counts is whether it has any text."""
        if any(tokens_backwards):
            self._at_start = False


class _CharacterStream:
    """UTF-8 from bytes to characters, each returned as soon as it is complete.

    Args:
        errors: "replace" makes one U+FFFD of each maximal broken piece of a character, "surrogateescape" (whose escapes
            become U+FFFD here) one of each byte.
    """

    def __init__(self, *, errors: Literal["replace", "surrogateescape"]) -> None:
        self._errors = errors
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._shown_by_prompt = 0  # how many U+FFFD the prompt's own text shows for the bytes that wait

    def feed(self, data: bytes, *, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if self._errors == "surrogateescape" and not text.isascii():
            text = _ESCAPED_BYTE.sub(REPLACEMENT, text)
        if self._shown_by_prompt and text:
            if text[0] == REPLACEMENT:
                text = text[self._shown_by_prompt :]
            self._shown_by_prompt = 0
        return text

    def finish(self) -> str:
        return self.feed(b"", final=True)

    def resume(self, tail: bytes) -> None:
        self._decoder.decode(tail)
        waiting, _ = self._decoder.getstate()
        self._shown_by_prompt = len(waiting) if self._errors == "surrogateescape" else min(len(waiting), 1)

"""Log-probabilities as OpenAI's two endpoints show them.

    engine          TokenLogprobs(id 314, -0.4, top ids (314, 260), top (-0.4, -1.9))   and the text it adds, " is"
    completions     {"tokens": [" is"], "token_logprobs": [-0.4], "top_logprobs": [{" is": -0.4, " the": -1.9}],
                     "text_offset": [21]}
    chat            [{"token": " is", "logprob": -0.4, "bytes": [32, 105, 115], "top_logprobs": [...]}]

What always holds:
- A token's string is the text that it adds, '' while a character is incomplete, so the strings join to the text. An
  alternative adds nothing to any text: it is named by its own bytes, `bytes:\\xf0\\x9f` if they are part of a
  character.
- `bytes` are the token's own; a special token that is not shown has none. So the bytes join to the text as well.
- The token that stands there is always among its alternatives, under the same string.
- -inf is written as -9999.0, as JSON has no infinity.

In vLLM: `vllm/entrypoints/openai/completion/serving.py` (`_create_completion_logprobs`) and its twin for chat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mini_vllm.outputs import TokenLogprobs
from mini_vllm.tokenizer.detokenizer import IncrementalDetokenizer
from mini_vllm.tokenizer.tokenizer import Tokenizer

NEVER = -9999.0  # what -inf is written as


class TokenNames:
    """How one request shows tokens.

    Args:
        tokenizer: the model's.
        skip_special_tokens: special tokens are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def alternative(self, token_id: int) -> str:
        """A token that stands nowhere: its text, or its bytes if they are no text."""
        own = self._tokenizer.token_bytes(token_id)
        try:
            return own.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def shown_bytes(self, token_id: int) -> list[int]:
        """The bytes that a token brings into the text."""
        is_hidden = self._skip_special_tokens and token_id in self._tokenizer.special_token_ids
        return [] if is_hidden else list(self._tokenizer.token_bytes(token_id))


def prompt_texts(tokenizer: Tokenizer, token_ids: Sequence[int], prompt: str | None) -> list[str]:
    """The text that each token of a prompt adds. They join to the prompt.

    Args:
        prompt: the text as it was given; a BOS that it does not begin with is the tokenizer's, and adds nothing.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
    texts = [detokenizer.push(token_id) for token_id in token_ids]
    texts[-1] += detokenizer.flush()
    if prompt is not None and token_ids[0] == tokenizer.bos_token_id and not prompt.startswith(texts[0]):
        texts[0] = ""
    return texts


def completion_logprobs(
    names: TokenNames, entries: Sequence[TokenLogprobs | None], texts: Sequence[str], offset: int
) -> dict[str, Any]:
    """Completions' form.

    Args:
        entries, texts: of each token; the first token of a prompt has no entry.
        offset: where the first token begins, in characters from the start of the prompt.
    """
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(texts),
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            None if entry is None else _top(names, entry, text) for entry, text in zip(entries, texts, strict=True)
        ],
        "text_offset": offsets,
    }


def _top(names: TokenNames, entry: TokenLogprobs, text: str) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
        if token_id != entry.token_id:
            top.setdefault(names.alternative(token_id), finite(logprob))
        else:
            top[text] = finite(logprob)
    top[text] = finite(entry.logprob)
    return top


def chat_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs], texts: Sequence[str]) -> dict[str, Any]:
    """Chat's form. Arguments as `completion_logprobs`."""
    return {"content": [_chat_entry(names, entry, text) for entry, text in zip(entries, texts, strict=True)]}


def _chat_entry(names: TokenNames, entry: TokenLogprobs, text: str) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": finite(entry.logprob),
        "bytes": names.shown_bytes(entry.token_id),
        "top_logprobs": [
            {
                "token": text if token_id == entry.token_id else names.alternative(token_id),
                "logprob": finite(logprob),
                "bytes": names.shown_bytes(token_id),
            }
            for token_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ],
    }


def prompt_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's form: for each prompt token a table by token id that holds the token itself."""
    return [None if entry is None else _prompt_table(names, entry) for entry in entries]


def _prompt_table(names: TokenNames, entry: TokenLogprobs) -> dict[str, Any]:
    table = {
        str(token_id): _prompt_entry(names, token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1)
    }
    table.setdefault(str(entry.token_id), _prompt_entry(names, entry.token_id, entry.logprob, None))
    return table


def _prompt_entry(names: TokenNames, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": names.alternative(token_id)}


def finite(logprob: float) -> float:
    return NEVER if logprob == -math.inf else logprob

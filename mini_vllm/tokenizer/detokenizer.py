"""Incremental detokenisation: the text that each sampled token adds.

Where it stands: the engine keeps one per sequence and pushes every sampled id; the strings that come back are what stop
strings are looked for in, what is streamed, and the token strings of logprobs.

    prompt  "Hello"                 the prompt's text is never returned, but it is context: the space that begins the
    push    " world"  -> " world"   first token stays, since it does not begin the text
    push    "é¾" of 龜 -> ""        a character in the making is held back ...
    push    "ľ"  of 龜 -> "龜"       ... until the token that completes it

What always holds:
- "".join(pushes) + flush() is what `Tokenizer.decode` of prompt and output has after the text of the prompt; U+FFFD
  appears only where the tokens themselves are no text, or at the very end if generation stopped inside a character.
- The cost of a push depends on nothing but the token.
- If the prompt itself ends inside a character, the output gets that character whole when it completes it; if it does
  not, the broken character's U+FFFD counts as the prompt's. Whoever shows prompt and output as one text (echo) gets it
  without a seam from a detokenizer with an empty prompt that the prompt's ids are pushed through first.

In vLLM: `vllm/v1/engine/detokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the ids of one sequence into text, one id at a time.

    Args:
        tokenizer: the model's.
        prompt_token_ids: what stands before the output; read from its end, only as far back as needed.
        skip_special_tokens: special tokens add no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = tokenizer.new_text_stream()
        shown = (self._shown(token_id) for token_id in reversed(prompt_token_ids))
        self._stream.resume(token for token in shown if token)

    def push(self, token_id: int) -> str:
        """Text that became final with this token: '' while a character is incomplete, or if the token is not shown."""
        token = self._shown(token_id)
        return self._stream.push(token) if token else ""

    def flush(self) -> str:
        """The rest at the end of the sequence (U+FFFD for an unfinished character). It belongs to the last token."""
        return self._stream.flush()

    def _shown(self, token_id: int) -> str:
        return self._tokenizer.shown_token(token_id, skip_special_tokens=self._skip_special_tokens)

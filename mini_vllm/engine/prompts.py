"""Prompts as a user may give them, and what is made of them.

Where it stands: in front of the input processor, which tokenises what comes out here.

    "text"                              {"prompt": "text"}                     a text
    [12, 7, 9], or an array of them     {"prompt_token_ids": [12, 7, 9]}       token ids
    [{"role": "user", "content": ...}]                                         chat messages

In vLLM: `vllm/inputs/data.py`, whose `TextPrompt` and `TokensPrompt` these are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypedDict, cast

from mini_vllm.errors import InvalidRequestError


class TextPrompt(TypedDict):
    """A text, in an object."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids, in an object."""

    prompt_token_ids: Sequence[int]


PlainPrompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
Prompt: TypeAlias = PlainPrompt | TextPrompt | TokensPrompt
_KEYS = ("prompt", "prompt_token_ids")


def prompts_in(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt of any kind as a list of one; a list of them as it is; a 2-D array as a list of its rows.

    Raises:
        InvalidRequestError: it is neither.
    """
    prompts = _without_array(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be text, token ids, messages or a list of these, got {type(prompts).__name__}",
            param="prompt",
        )
    is_single = len(prompts) > 0 and (isinstance(prompts[0], Integral) or _is_message(prompts[0]))
    return [cast(Prompt, prompts)] if is_single else list(cast("Sequence[Prompt]", prompts))


def plain_prompt(prompt: Prompt) -> PlainPrompt:
    """The same prompt out of its object, and an array as the list of its numbers.

    Raises:
        InvalidRequestError: an object with other keys, or with a value of the wrong kind.
    """
    if not isinstance(prompt, Mapping):
        plain: PlainPrompt = _without_array(prompt)
        return plain
    keys = [str(key)[:80] for key in prompt]
    if len(keys) != 1 or keys[0] not in _KEYS:
        raise InvalidRequestError(
            f"a prompt that is an object has one of {' and '.join(_KEYS)} and nothing else; got "
            f"{', '.join(map(repr, keys)) or 'nothing'}",
            param="prompt",
        )
    (value,) = prompt.values()
    value = _without_array(value)
    if isinstance(value, str) != (keys[0] == "prompt") or is_chat(value):
        wanted = "a text" if keys[0] == "prompt" else "a list of token ids"
        raise InvalidRequestError(f"{keys[0]} must be {wanted}, got {type(value).__name__}", param=keys[0])
    inner: PlainPrompt = value
    return inner


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_token_ids(prompt: Any) -> list[int]:
    """Token ids as Python's integers.

    Raises:
        InvalidRequestError: it is no list of whole numbers, or an empty one.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequestError(
            f"prompt must be text, token ids or chat messages, got {type(prompt).__name__}", param="prompt"
        )
    if not prompt:
        raise InvalidRequestError("prompt is empty; it must hold at least one token id", param="prompt")
    if set(map(type, prompt)) == {int}:
        return list(prompt)
    return [_whole(token_id) for token_id in prompt]


def _whole(token_id: Any) -> int:
    """An integer of Python or NumPy as Python's; booleans and 1.0 are none."""
    try:
        if isinstance(token_id, bool):
            raise TypeError("a boolean is no token id")
        return operator.index(token_id)
    except TypeError as error:
        raise InvalidRequestError(
            f"prompt must hold whole numbers, got {str(token_id)[:80]!r} in it", param="prompt"
        ) from error


def _is_message(value: Any) -> bool:
    """Whether an object is a message rather than a prompt; only messages have a role or content."""
    return isinstance(value, Mapping) and ("role" in value or "content" in value)


def _without_array(prompt: Any) -> Any:
    """An array (of NumPy, PyTorch) as the list of its numbers."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt

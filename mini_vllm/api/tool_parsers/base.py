"""What the tool parsers have in common: text in, text and whole calls out.

    push("Let me look. <tool_ca")   -> "Let me look. "                  what may be the beginning of a call is held back
    push('ll>{"name": "find", ')    -> nothing                          a call is held until it is whole
    push('"arguments": {}}</tool_call>')  -> ParsedCall("find", "{}")
    finish()                        -> nothing is left

What always holds:
- What comes out depends on the text alone, not on how it was cut into pieces. So a streamed answer and a whole one have
  the same calls, as both go this way.
- A call comes out when it is whole and well formed. Anything else comes out as the text it was: nothing is lost.

In vLLM: `vllm/tool_parsers/abstract_tool_parser.py`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from mini_vllm.api.json_body import NanOrInfinity, without_lone_surrogates


@dataclass(frozen=True)
class ParsedCall:
    """A call that the model wrote.

    Args:
        name: of a function that the request offers.
        arguments: the text of a JSON object; of its beginning, for a call that was cut.
    """

    name: str
    arguments: str


Part: TypeAlias = str | ParsedCall
ObjectRules: TypeAlias = Callable[[str], str]
TokenRule: TypeAlias = Callable[[str], str]


class ToolParser(ABC):
    """Reads one answer.

    Args:
        names: of the functions that the request offers; calls of others are text.
    """

    needs_special_tokens: ClassVar[bool] = False  # the text must show the model's special tokens
    id_length: ClassVar[int] = 24  # characters of a call's id; some templates insist on a number

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""  # text that is not decided yet

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Whether a chat template (its Jinja source) shows that its model writes calls in this form."""

    @classmethod
    @abstractmethod
    def calls_rules(cls, objects: ObjectRules, most: int, token: TokenRule) -> str:
        """Lark rules that end in `calls`: one call or several in this form, and nothing else.

        Args:
            objects: for the word that stands before the arguments, the inside of a call's object, `"name": "f",
                "arguments": {...}`, of any of the functions.
            most: so many calls at most.
            token: for a special token, its name in Lark; its text where the model has none.
        """

    @classmethod
    @abstractmethod
    def free_rules(cls, most: int, token: TokenRule) -> str:
        """More of them, that end in `free`: an answer that may have calls, text, or both as far as the form goes."""

    def push(self, text: str) -> list[Part]:
        """Take more of the answer; give what is decided."""
        self._held += text
        return [part for part in self._take(is_last=False) if part]

    def finish(self) -> list[Part]:
        """The answer has ended: everything is decided."""
        parts = [*self._take(is_last=True), self._held]
        self._held = ""
        return [part for part in parts if part]

    @property
    def unfinished(self) -> str:
        """Text that is not decided yet."""
        return self._held

    @abstractmethod
    def _take(self, *, is_last: bool) -> Iterator[Part]:
        """Take what is decided away from the beginning of `_held`."""

    def _take_text_before(self, mark: str, *, is_last: bool) -> str:
        """Take the text before a mark away; `_held` then begins with the mark, or with what may become it, or ends."""
        begin = self._held.find(mark)
        if begin < 0:
            begin = len(self._held) - (0 if is_last else beginning_of(mark, self._held))
        text, self._held = self._held[:begin], self._held[begin:]
        return text

    def _call(self, value: Any, *, needs_arguments: bool = False) -> ParsedCall | None:
        """The call that a JSON value stands for; None if it is none."""
        if not isinstance(value, dict):
            return None
        given = value.get("arguments", value.get("parameters"))
        if given is None and needs_arguments:
            return None
        return self._call_of(value.get("name"), {} if given is None else given)

    def _call_of(self, name: Any, arguments: Any) -> ParsedCall | None:
        if isinstance(arguments, str):  # some models write the object's text
            arguments = parse_json(arguments)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        try:
            clean = without_lone_surrogates(arguments)
            return ParsedCall(name, json.dumps(clean, ensure_ascii=False, allow_nan=False, default=_refuse))
        except (ValueError, RecursionError):  # a number without end, which Python reads and JSON has not; deep nesting
            return None

    def _calls(self, values: Any) -> list[ParsedCall] | None:
        """The calls of a list of JSON values; None if it is no list, is empty, or one of them is no call."""
        calls = [self._call(value) for value in values] if isinstance(values, list) else []
        whole = [call for call in calls if call is not None]
        return whole if whole and len(whole) == len(calls) else None


def parse_json(text: str) -> Any:
    """The value of a text that a model wrote; None if it is no JSON. Line breaks in strings are let through."""
    try:
        return json.loads(text, strict=False, parse_constant=NanOrInfinity)
    except (ValueError, RecursionError):
        return None


def more_calls(rule: str, most: int) -> str:
    """In Lark: what stands behind a first call, so that there are `most` at most."""
    return f"({rule}){{0,{most - 1}}}" if most > 1 else ""


def _refuse(value: object) -> Any:
    raise ValueError(f"{value!r} is not JSON")


def beginning_of(mark: str, text: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)

"""Calls behind a special token, as Mistral's models write them; text may stand before it.

    [TOOL_CALLS][{"name": "find", "arguments": {"q": "blue"}}, {"name": "get_time", "arguments": {}}]
    [TOOL_CALLS]find[ARGS]{"q": "blue"}             the newer models; one token before each call

In vLLM: `mistral_tool_parser.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mini_vllm.api.tool_parsers.base import (
    ObjectRules,
    Part,
    TokenRule,
    ToolParser,
    more_calls,
    parse_json,
)
from mini_vllm.api.tool_parsers.brackets import BracketScanner

MARK = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?={)")
_BEGINNING_OF_NAME = re.compile(r"[\w.\-\[\]\s]*")


class MistralParser(ToolParser):
    """Reads both forms; enforces the older one, which all of these models know."""

    needs_special_tokens = True
    id_length = 9  # the templates refuse any other

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._is_inside = False
        self._scanner = BracketScanner()

    @classmethod
    def fits(cls, template: str) -> bool:
        return MARK in template

    @classmethod
    def calls_rules(cls, objects: ObjectRules, most: int, token: TokenRule) -> str:
        more = more_calls('", " call', most)
        array = f'"[" call {more} "]"'
        return f'calls: {token(MARK)} array\narray: {array}\ncall: "{{" ({objects("arguments")}) "}}"\n'

    @classmethod
    def free_rules(cls, most: int, token: TokenRule) -> str:
        mark = token(MARK)
        lazy = "[lazy]" if mark.startswith('"') else ""  # as text it must be found as soon as it is there
        return f"free: text_to_call array | TEXT\ntext_to_call{lazy}: TEXT {mark}\nTEXT: /(.|\\n)*/\n"

    def _take(self, *, is_last: bool) -> Iterator[Part]:
        while True:
            if not self._is_inside:
                yield self._take_text_before(MARK, is_last=is_last)
                if not self._held.startswith(MARK):
                    return
                self._is_inside, self._scanner = True, BracketScanner()
            block = self._read()
            if block is None:
                return
            text, parts = block
            self._is_inside, self._held = False, self._held[len(text) :]
            yield from parts or [text]

    def _read(self) -> tuple[str, Sequence[Part] | None] | None:
        """The text behind which it goes on, and its calls, if it is any; None as long as that is not clear."""
        begin = len(MARK) + len(self._held[len(MARK) :]) - len(self._held[len(MARK) :].lstrip())
        if begin == len(self._held):
            return None
        name = None
        if self._held[begin] != "[":
            name = _NAME.match(self._held, begin)
            if name is None:
                rest = _BEGINNING_OF_NAME.match(self._held, begin)
                is_clear = rest is None or rest.end() < len(self._held)
                return (MARK, None) if is_clear else None
            begin = name.end()
        end = self._scanner.end(self._held, begin)
        if end is None:
            return None
        value = parse_json(self._held[begin:end])
        calls = self._calls(value) if name is None else self._calls([{"name": name.group(1), "arguments": value}])
        return self._held[:end], calls

"""Calls between tags, as Hermes, Qwen2.5, Qwen3 and many others write them; text may stand before and between.

    <tool_call>
    {"name": "find", "arguments": {"q": "blue"}}
    </tool_call>

In vLLM: `hermes_tool_parser.py`.
"""

from __future__ import annotations

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

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """The object ends where its brackets say, so a tag inside a string is part of the string."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._is_inside = False
        self._scanner = BracketScanner()
        self._searched = 0  # up to here `_held` has no end

    @classmethod
    def fits(cls, template: str) -> bool:
        return BEGIN in template and "<function=" not in template  # that is Qwen3-Coder's, in XML

    @classmethod
    def calls_rules(cls, objects: ObjectRules, most: int, token: TokenRule) -> str:
        more = more_calls(f'"\\n{BEGIN}" tail', most)
        tail = f'"\\n{{" ({objects("arguments")}) "}}\\n{END}"'
        return f'calls: "{BEGIN}" tail {more}\ntail: {tail}\n'

    @classmethod
    def free_rules(cls, most: int, token: TokenRule) -> str:
        # What follows a last call is free text, which would let another call through: so there is no last one.
        whole = "text_to_call tail | TEXT" if most == 1 else "(text_to_call tail)* TEXT"
        return f'free: {whole}\ntext_to_call[lazy]: TEXT "{BEGIN}"\nTEXT: /(.|\\n)*/\n'

    def _take(self, *, is_last: bool) -> Iterator[Part]:
        while True:
            if not self._is_inside:
                yield self._take_text_before(BEGIN, is_last=is_last)
                if not self._held.startswith(BEGIN):
                    return
                self._is_inside, self._scanner, self._searched = True, BracketScanner(), len(BEGIN)
            end = self._end()
            if end is None and not is_last:
                return
            # Without its end tag a call counts at the end of the answer: the end of sequence often takes its place.
            block = self._held[:end]
            self._is_inside, self._held = False, self._held[len(block) :]
            yield from self._read(block)

    def _end(self) -> int | None:
        """The position behind the call's end tag."""
        is_json = self._held[len(BEGIN) :].lstrip().startswith(("{", "["))
        while True:
            place = self._held.find(END, self._searched)
            if place < 0:
                self._searched = max(self._searched, len(self._held) - len(END) + 1)
                return None
            if not is_json:
                return place + len(END)
            is_closed = self._scanner.end(self._held[:place], len(BEGIN)) is not None
            if is_closed or not self._scanner.is_in_string:
                return place + len(END)
            self._searched = place + len(END)

    def _read(self, block: str) -> list[Part]:
        value = parse_json(block.removeprefix(BEGIN).removesuffix(END))
        calls = self._calls(value if isinstance(value, list) else [value])
        return [block] if calls is None else [*calls]

"""Calls as the whole answer, in JSON, as Llama 3.1 and later write them; several stand one behind the other.

    {"name": "find", "parameters": {"q": "blue"}}; {"name": "get_time", "parameters": {}}

An answer that begins with anything else is text to its end, and so is a JSON object that is no call.

In vLLM: `llama_tool_parser.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mini_vllm.api.tool_parsers.base import ObjectRules, Part, TokenRule, ToolParser, more_calls, parse_json
from mini_vllm.api.tool_parsers.brackets import BracketScanner

PYTHON_TAG = "<|python_tag|>"  # a special token that may stand before a call
SPACE = " \n\r\t"


class Llama3JsonParser(ToolParser):
    """An object after the other, until something is no call."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._is_text = False
        self._between = SPACE  # characters that may stand before the next call
        self._scanner = BracketScanner()

    @classmethod
    def fits(cls, template: str) -> bool:
        return '"parameters": ' in template and "<|eot_id|>" in template and "[func_name1(" not in template

    @classmethod
    def calls_rules(cls, objects: ObjectRules, most: int, token: TokenRule) -> str:
        more = more_calls('"; " call', most)
        return f'calls: call {more}\ncall: "{{" ({objects("parameters")}) "}}"\n'

    @classmethod
    def free_rules(cls, most: int, token: TokenRule) -> str:
        return "free: calls | TEXT\nTEXT: /[^{ \\n\\r\\t](.|\\n)*/\n"

    def _take(self, *, is_last: bool) -> Iterator[Part]:
        while not self._is_text:
            begin = self._begin()
            if begin is None:
                return
            if not self._held.startswith("{", begin):
                self._is_text = True
                break
            end = self._scanner.end(self._held, begin)
            if end is None:
                return
            call = self._call(parse_json(self._held[begin:end]), needs_arguments=True)
            if call is None:
                self._is_text = True
                break
            self._held, self._between, self._scanner = self._held[end:], SPACE + ";,", BracketScanner()
            yield call
        text, self._held = self._held, ""
        yield text

    def _begin(self) -> int | None:
        """Where the next call or text begins; None as long as nothing has come."""
        rest = self._held.lstrip(self._between)
        if rest.startswith(PYTHON_TAG):
            rest = rest[len(PYTHON_TAG) :].lstrip(SPACE)
        elif PYTHON_TAG.startswith(rest):
            return None
        return len(self._held) - len(rest) if rest else None

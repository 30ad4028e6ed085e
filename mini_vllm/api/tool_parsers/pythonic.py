"""Calls as a list of Python calls, as Llama 3.2, Llama 4 and others write them; the list is the whole answer.

    [find(q="blue", k=3), get_time()]

Nothing is run: Python's own parser reads the text, and only literals count as arguments. A schema cannot be enforced in
Python's syntax, so calls that are enforced come as JSON: [{"name": "find", "arguments": {"q": "blue", "k": 3}}].

In vLLM: `pythonic_tool_parser.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from mini_vllm.api.tool_parsers.base import ObjectRules, ParsedCall, Part, TokenRule, ToolParser, more_calls, parse_json
from mini_vllm.api.tool_parsers.brackets import BracketScanner

MAX_LENGTH = 64 * 1024  # characters of a list that Python's parser is given
_JSON_NAMES = (("true", True), ("false", False), ("null", None))  # models mix the two languages up


class PythonicParser(ToolParser):
    """An answer that begins with a bracket is held until that closes; all other text goes through."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._is_text = False
        self._scanner = BracketScanner("\"'")

    @classmethod
    def fits(cls, template: str) -> bool:
        return "[func_name1(" in template

    @classmethod
    def calls_rules(cls, objects: ObjectRules, most: int, token: TokenRule) -> str:
        more = more_calls('", " call', most)
        return f'calls: "[" call {more} "]"\ncall: "{{" ({objects("arguments")}) "}}"\n'

    @classmethod
    def free_rules(cls, most: int, token: TokenRule) -> str:
        return "free: calls | TEXT\nTEXT: /[^\\[ \\n\\r\\t](.|\\n)*/\n"

    def _take(self, *, is_last: bool) -> Iterator[Part]:
        if not self._is_text:
            begin = len(self._held) - len(self._held.lstrip())
            if begin == len(self._held):
                return
            if self._held[begin] == "[":
                end = self._scanner.end(self._held, begin)
                if end is None:
                    return
                calls = self._read(self._held[begin:end])
                if calls is not None:
                    self._held = self._held[end:]
                    yield from calls
            self._is_text = True
        text, self._held = self._held, ""
        yield text

    def _read(self, text: str) -> list[ParsedCall] | None:
        as_json = self._calls(parse_json(text))
        if as_json is not None or len(text) > MAX_LENGTH:
            return as_json
        try:
            tree = ast.parse(text, mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List) else []
            calls = [self._call_of(*_call(node)) for node in nodes]
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last one is how it says "nested too deep"
            return None
        whole = [call for call in calls if call is not None]
        return whole if whole and len(whole) == len(calls) else None


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Name and arguments of `name(a=1, ...)`."""
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("not a call with named arguments")
    return ast.unparse(node.func), {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}


def _value(node: ast.expr) -> Any:
    """The value of a literal."""
    for name, value in _JSON_NAMES:
        if isinstance(node, ast.Name) and node.id == name:
            return value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("an object's keys are strings")
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, (str, int, float, bool)):
        raise ValueError(f"{type(value).__name__} is not JSON")
    return value

"""From an answer's text to a message: reasoning, content, and function calls.

    text -> reasoning parser -> reasoning_content
                |
                '-> tool parser -> content
                        |
                        '-> tool_calls

Where it stands: `ChatWriter` has one reader a choice, for requests with tools or models that think. A whole answer is
pushed at once, a streamed one piece by piece; the message is the same.

What always holds: of text nothing is lost but white space around calls and thinking.

In vLLM: the serving code of chat completions, around `extract_tool_calls` and `extract_tool_calls_streaming`.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

from mini_vllm.api.reasoning_parsers import ReasoningParser, Split
from mini_vllm.api.tool_parsers import ParsedCall, ToolParser
from mini_vllm.outputs import FinishReason

_CALL = re.compile(r'"name": "(?P<name>[^"]*)", "(?:arguments|parameters)": ')


@dataclass(frozen=True)
class MessagePart:
    """What is new of a message.

    Args:
        calls: in OpenAI's form, without their place in the list.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[dict[str, Any], ...] = ()


class MessageReader:
    """Reads one answer.

    Args:
        reasoning: None for a model that does not think in its text.
        tools: None if the request may not call any.
        is_forced: a grammar sees to it that the answer is calls and nothing else.
        forced_name: of the only function that may be called, if there is but one.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        is_forced: bool = False,
        forced_name: str | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._is_forced = is_forced
        self._forced_name = forced_name
        self._blanks = ""  # white space that belongs to the content if text follows it
        self._was_call = False
        self.num_calls = 0
        self.has_cut_call = False

    def push(self, text: str, finish_reason: FinishReason | None) -> MessagePart:
        """Take more of the answer; its end has a finish reason."""
        is_last = finish_reason is not None
        split = Split(content=text) if self._reasoning is None else self._reasoning.push(text, is_last=is_last)
        if self._tools is None:
            return MessagePart(split.reasoning, split.content)
        parts = self._tools.push(split.content)
        if is_last and self._is_forced:
            has_others = self.num_calls > 0 or any(isinstance(part, ParsedCall) for part in parts)
            parts += self._cut_calls(self._tools.unfinished, has_others=has_others)
        elif is_last:
            parts += self._tools.finish()
        content = "".join(self._text_of(part) for part in parts)
        if is_last and not self._was_call:
            content, self._blanks = content + self._blanks, ""
        calls = [part for part in parts if isinstance(part, ParsedCall)]
        self.num_calls += len(calls)
        return MessagePart(split.reasoning, content, tuple(self._shown(call) for call in calls))

    def _text_of(self, part: str | ParsedCall) -> str:
        """The content that a part adds; white space waits for what comes behind it."""
        self._was_call = isinstance(part, ParsedCall) or (self._was_call and not part.strip())
        if isinstance(part, ParsedCall):
            self._blanks = ""
            return ""
        text = self._blanks + part
        size = len(text.rstrip())
        self._blanks = text[size:]
        return text[:size]

    def _cut_calls(self, text: str, *, has_others: bool) -> list[str | ParsedCall]:
        """What max_tokens or a stop string cut, as far as it came. A grammar wrote it, so its form is known."""
        calls: list[str | ParsedCall] = []
        place = 0
        while (head := _CALL.search(text, place)) is not None:
            arguments = text[head.end() :]
            size = _size_of_json(arguments)
            self.has_cut_call = size is None
            calls.append(ParsedCall(head["name"], arguments[:size]))
            place = len(text) if size is None else head.end() + size
        if calls or has_others or not text:
            return calls
        if self._forced_name is None:
            return [text]
        self.has_cut_call = True
        return [ParsedCall(self._forced_name, "")]

    def _shown(self, call: ParsedCall) -> dict[str, Any]:
        size = 24 if self._tools is None else self._tools.id_length
        # Mistral's templates want letters and digits alone; OpenAI's own ids begin with call_.
        call_id = uuid.uuid4().hex[:size] if size < 24 else f"call_{uuid.uuid4().hex[:size]}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _size_of_json(text: str) -> int | None:
    """Length of the JSON value that a text begins with; None if it is not whole."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)[1]
    except (ValueError, RecursionError):
        return None

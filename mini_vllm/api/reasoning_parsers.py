"""Reasoning parsers: where a model's thinking ends and its answer begins.

    <think>
    The user asks ...                 -> reasoning_content
    </think>

    It is noon.                       -> content

Where it stands: `api/message_reader.py` pushes an answer's text through one before anything else reads it.

What always holds: what comes out depends on the text alone, not on how it was cut into pieces; white space around the
tags belongs to neither part; an answer that is cut while it thinks is all reasoning.

In vLLM: `vllm/reasoning/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mini_vllm.api.tool_parsers.base import beginning_of
from mini_vllm.tokenizer.chat_template import ChatTemplate

BEGIN, END = "<think>", "</think>"


@dataclass(frozen=True)
class Split:
    """New text of both kinds."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Reads one answer.

    Args:
        prompt_end: the last characters of the prompt: a template may begin the thinking there, or end it.
    """

    thinks_unless_told: ClassVar[bool]  # the model thinks even where neither prompt nor answer has the first tag

    def __init__(self, prompt_end: str) -> None:
        end = prompt_end.rstrip()
        self._state = "begin"  # -> "thinking" -> "behind" (white space is left out) -> "answer"
        if end.endswith(BEGIN):
            self._state = "thinking"
        elif end.endswith(END):
            self._state = "answer"
        self._held = ""
        self._has_reasoning = False

    def push(self, text: str, *, is_last: bool = False) -> Split:
        """Take more of the answer; `is_last` if nothing follows."""
        self._held += text
        reasoning = ""
        if self._state == "begin":
            self._begin(is_last=is_last)
        if self._state == "thinking":
            reasoning = self._think(is_last=is_last)
        if self._state == "behind":
            self._held = self._held.lstrip()
            self._state = "answer" if self._held else "behind"
        content = ""
        if self._state == "answer":
            content, self._held = self._held, ""
        return Split(reasoning, content)

    def _begin(self, *, is_last: bool) -> None:
        start = self._held.lstrip()
        if start.startswith(BEGIN):
            self._state, self._held = "thinking", start[len(BEGIN) :]
        elif is_last or not BEGIN.startswith(start):
            self._state = "thinking" if self.thinks_unless_told else "answer"

    def _think(self, *, is_last: bool) -> str:
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        end = self._held.find(END)
        if end >= 0:
            reasoning, self._held = self._held[:end].rstrip(), self._held[end + len(END) :]
            self._state = "behind"
        else:
            # White space may be the last before the tag, and the tag's beginning may be here already.
            undecided = beginning_of(END, self._held)
            size = len(self._held) if is_last else len(self._held[: len(self._held) - undecided].rstrip())
            reasoning, self._held = self._held[:size], self._held[size:]
            reasoning = reasoning.rstrip() if is_last else reasoning
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        return reasoning


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek-R1 and what was distilled from it always think, with or without the first tag."""

    thinks_unless_told = True


class Qwen3Parser(ReasoningParser):
    """Qwen3 thinks if the prompt or the answer begins with the tag; `enable_thinking` of its template decides."""

    thinks_unless_told = False


def _parsers() -> dict[str, type[ReasoningParser]]:
    return {"deepseek_r1": DeepSeekR1Parser, "qwen3": Qwen3Parser}


def reasoning_parser_named(name: str) -> type[ReasoningParser]:
    """The parser of that name."""
    return _parsers()[name]


def reasoning_parser_of(template: ChatTemplate) -> type[ReasoningParser] | None:
    """The parser for a model, as far as its chat template tells; None for a model that does not think in tags."""
    source = template.source(with_tools=False) or ""
    if END not in source:
        return None
    return Qwen3Parser if "enable_thinking" in source else DeepSeekR1Parser

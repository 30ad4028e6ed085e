"""Tool parsers: how a model writes function calls in its text, one small class a form.

    hermes         <tool_call>{"name": "find", "arguments": {"q": "blue"}}</tool_call>
    llama3_json    {"name": "find", "parameters": {"q": "blue"}}
    mistral        [TOOL_CALLS][{"name": "find", "arguments": {"q": "blue"}}]
    pythonic       [find(q="blue")]

Where it stands: `api/tools.py` takes a parser's grammar for calls that are enforced, `api/message_reader.py` pushes an
answer's text through it. To add a form: a file with a subclass of `ToolParser`, a line in `_parsers`, and its name in
`ServerConfig`.

In vLLM: `vllm/tool_parsers/` (older versions: `vllm/entrypoints/openai/tool_parsers/`).
"""

from __future__ import annotations

from mini_vllm.api.tool_parsers.base import ParsedCall, ToolParser
from mini_vllm.api.tool_parsers.hermes import HermesParser
from mini_vllm.api.tool_parsers.llama3_json import Llama3JsonParser
from mini_vllm.api.tool_parsers.mistral import MistralParser
from mini_vllm.api.tool_parsers.pythonic import PythonicParser
from mini_vllm.tokenizer.chat_template import ChatTemplate

__all__ = ["ParsedCall", "ToolParser", "parser_named", "parser_of"]


def _parsers() -> dict[str, type[ToolParser]]:
    return {
        "hermes": HermesParser,
        "llama3_json": Llama3JsonParser,
        "mistral": MistralParser,
        "pythonic": PythonicParser,
    }


def parser_named(name: str) -> type[ToolParser]:
    """The parser of that name."""
    return _parsers()[name]


def parser_of(template: ChatTemplate) -> type[ToolParser] | None:
    """The parser for the calls of a model, as far as its chat template tells; None where it is not clear."""
    if not template.shows_tools:
        return HermesParser  # our own text shows it the tools, and asks for this form
    source = template.source(with_tools=True) or ""
    fits = [parser for parser in _parsers().values() if parser.fits(source)]
    return fits[0] if len(fits) == 1 else None

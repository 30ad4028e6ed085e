"""The tools of a request: checked, chosen, and enforced where that is asked for.

    tool_choice        the model sees them    it may call    enforced by a grammar
    "none"             no                     no             no
    "auto"             yes                    yes            arguments of functions with `strict`, and
                                                             parallel_tool_calls=false
    "required"         yes                    it must        calls and nothing else; all arguments
    one, by its name   yes                    it must        one call of that function

Where it stands: `protocol.py` makes a `ToolPlan` of a body, `chat.py` asks it for sampling parameters and readers.

In vLLM: `vllm/entrypoints/openai/chat_completion/protocol.py` and `vllm/tool_parsers/utils.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mini_vllm.api.errors import shown
from mini_vllm.api.tool_parsers import ToolParser
from mini_vllm.errors import InvalidRequestError
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.structured_outputs import StructuredOutputsParams, ToolCallForm

MAX_TOOLS = 128
MAX_CALLS = 32  # of an answer that must call
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OWN_TYPES = ("$ref", "anyOf", "oneOf", "allOf", "patternProperties", "additionalProperties")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class Tool:
    """A function that may be called.

    Args:
        arguments: the form of its arguments, an object's JSON schema.
        is_strict: its arguments follow the schema in any case.
        shown: as the request had it, for the chat template.
    """

    name: str
    arguments: StructuredOutputsParams
    is_strict: bool
    shown: Mapping[str, Any]


@dataclass(frozen=True)
class ToolPlan:
    """What a request wants done with its tools.

    Args:
        mode: how free the model is to call them.
        tools: those that it may call: of a named one, it alone.
        all_tools: those that it is shown.
        is_parallel: several calls may be in one answer.
    """

    mode: Mode
    tools: tuple[Tool, ...] = ()
    all_tools: tuple[Tool, ...] = ()
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be calls."""
        return self.mode in ("required", "named")

    @property
    def shown(self) -> list[Mapping[str, Any]] | None:
        """The tools that the chat template shows."""
        return [tool.shown for tool in self.all_tools] or None

    @property
    def only_name(self) -> str | None:
        """The function that must be called, if there is but one."""
        return self.tools[0].name if self.is_forced and len(self.tools) == 1 else None

    def sampling_params(
        self, params: SamplingParams, parser: type[ToolParser], special_token: Callable[[str], int | None]
    ) -> SamplingParams:
        """The parameters with the form that the calls must have, if it is enforced.

        Args:
            params: of the request, with the form of its text, if any.
            parser: of the form in which the model writes calls.
            special_token: id of a special token of the model's, None if it has no such token.

        Raises:
            InvalidRequestError: two forms that contradict each other, or a schema that cannot be enforced.
        """
        answer = params.structured_outputs
        is_the_texts = isinstance(answer, StructuredOutputsParams) and answer.origin == "response_format"
        if answer is not None and not is_the_texts:
            if self.is_forced or self._is_bound:
                raise InvalidRequestError(
                    "structured_outputs gives the whole answer a form, and so do tool_choice, strict tools and "
                    "parallel_tool_calls=false; leave one out, or use response_format",
                    param="structured_outputs",
                )
            return self._showing(params, parser)
        if self.is_forced or self._is_bound or is_the_texts:
            own = answer if isinstance(answer, StructuredOutputsParams) and not self.is_forced else None
            params = replace(params, structured_outputs=self._form(own, parser, special_token))
        if self.is_forced:
            params = replace(params, stop=())  # stop strings end a text; a call that was demanded comes whole
        return self._showing(params, parser)

    def _showing(self, params: SamplingParams, parser: type[ToolParser]) -> SamplingParams:
        return replace(params, skip_special_tokens=False) if parser.needs_special_tokens else params

    @property
    def _is_bound(self) -> bool:
        return not self.is_parallel or any(tool.is_strict for tool in self.tools)

    def _form(
        self,
        answer: StructuredOutputsParams | None,
        parser: type[ToolParser],
        special_token: Callable[[str], int | None],
    ) -> ToolCallForm:
        def objects(word: str) -> str:
            heads = [json.dumps(f'"name": "{tool.name}", "{word}": ') for tool in self.tools]
            return " | ".join(f"{head} @arguments_{index}" for index, head in enumerate(heads))

        def token(text: str) -> str:
            token_id = special_token(text)
            return json.dumps(text) if token_id is None else f"<[{token_id}]>"

        most = MAX_CALLS if self.is_parallel and self.mode != "named" else 1
        rules = parser.calls_rules(objects, most, token)
        if self.is_forced:
            start = "calls"
        elif answer is not None:
            start = "@answer | calls"
        else:
            start, rules = "free", rules + parser.free_rules(most, token)
        # Nobody asked for the arguments of a function without `strict` to be more than JSON.
        anything = StructuredOutputsParams(json_object=True)
        arguments = tuple(tool.arguments if self.is_forced or tool.is_strict else anything for tool in self.tools)
        return ToolCallForm(f"%llguidance {{}}\nstart: {start}\n{rules}", arguments, answer)


def plan_tools(tools: Sequence[Any] | None, choice: Any, is_parallel: bool | None) -> ToolPlan:
    """The plan of a request's `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        InvalidRequestError: with the field in `param`.
    """
    offered = _checked_tools(tools or ())
    name = _chosen_name(choice)
    if name is None and choice not in (None, "none", "auto", "required"):
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}; got '
            f"{shown(choice)}",
            param="tool_choice",
        )
    if not offered:
        if name is not None or choice == "required":
            raise InvalidRequestError(
                f"tool_choice {shown(choice)} needs tools to choose from, and there are none", param="tool_choice"
            )
        return ToolPlan("none")
    if choice == "none":
        return ToolPlan("none")
    parallel = is_parallel is not False
    if name is None:
        return ToolPlan("required" if choice == "required" else "auto", offered, offered, parallel)
    named = tuple(tool for tool in offered if tool.name == name)
    if not named:
        raise InvalidRequestError(
            f"tool_choice names the function {shown(name)}, which is none of the tools", param="tool_choice"
        )
    return ToolPlan("named", named, offered, parallel)


def _chosen_name(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _checked_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools holds {len(tools)} functions; at most {MAX_TOOLS} are allowed", param="tools")
    checked = tuple(_checked_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool.name for tool in checked]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequestError(f"tools has two functions of the name {shown(name)}", param="tools")
    return checked


def _checked_tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise _refuse(place, f'must be {{"type": "function", "function": {{"name": ...}}}}; got {shown(tool)}')
    function = tool["function"]
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refuse(f"{place}.function.name", f"must be 1 to 64 of A-Z, a-z, 0-9, _, . and -; got {shown(name)}")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _refuse(
            f"{place}.function.parameters", f"must be a JSON schema, an object; got {shown(parameters)}", name
        )
    if not isinstance(function.get("description"), str | None):
        raise _refuse(f"{place}.function.description", f"must be a text; got {shown(function['description'])}", name)
    if not isinstance(strict, bool | None):
        raise _refuse(f"{place}.function.strict", f"must be true or false; got {shown(strict)}", name)
    return Tool(name, _arguments_form(parameters, place, name), bool(strict), tool)


def _arguments_form(parameters: Mapping[str, Any] | None, place: str, name: str) -> StructuredOutputsParams:
    """The form of a function's arguments: an object's, without properties that nobody named.

    JSON schema lets an object have any more properties unless it says otherwise. A function takes the arguments that it
    has, so here it is the other way round.
    """
    schema = dict(parameters or {})
    if schema.setdefault("type", "object") != "object":
        raise _refuse(f"{place}.function.parameters.type", f"must be object; got {shown(schema['type'])}", name)
    if not any(word in schema for word in _OWN_TYPES):
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
    return StructuredOutputsParams(json=schema, origin=f"{place}.function.parameters {_of(name)}")


def _refuse(place: str, reason: str, name: str | None = None) -> InvalidRequestError:
    """The error of a tool, with its name if it has one: who sends a hundred does not know them by their numbers."""
    return InvalidRequestError(f"{place} {reason}" if name is None else f"{place} {_of(name)} {reason}", param=place)


def _of(name: str) -> str:
    return f"(of {name!r})"

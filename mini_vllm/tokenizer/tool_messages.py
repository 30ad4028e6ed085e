"""Tools in a conversation: as a template wants them, or as text for a template that knows no tools.

Where it stands: `ChatTemplate.render` calls it between checking the messages and running the template.

A call in a message is `{"function": {"name": "find", "arguments": ...}}`. OpenAI's arguments are a text of JSON. Most
templates write them with `| tojson` and want the object, else the text comes out quoted twice; a few put the text
together with `+` and fail on an object. `wants_text` finds out which, by trying.

A template that knows no tools would drop them without a word. For it the tools are written into the system message, and
calls and results into the messages' text, in the form that most open models were trained on (Nous Research's Hermes):

    <tool_call>
    {"name": "find", "arguments": {"q": "blue"}}
    </tool_call>

In vLLM: the postprocessing of messages in `vllm/entrypoints/chat_utils.py`; it has no text for templates without tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mini_vllm.errors import InvalidRequestError
from mini_vllm.json_text import parse_json

_TOOLS_TEXT = """\
You may call one or more functions to assist with the user query. These are the functions, as JSON within <tools>:
<tools>
{tools}
</tools>

For each function call, write a JSON object with the function's name and its arguments within <tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""
_PROBE = {"probed_argument": "x"}


def check_tool_calls(tool_calls: Any, place: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, checked; the arguments stay as they were given.

    Args:
        tool_calls: plain JSON.
        place: where it stands in the request, for errors.

    Raises:
        InvalidRequestError: `param` is the place.
    """
    if not isinstance(tool_calls, list):
        raise InvalidRequestError(f"{place} must be a list of calls.", param=place)
    for index, call in enumerate(tool_calls):
        here = f"{place}[{index}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(f"{here} must be an object with the name of a function.", param=here)
        _arguments(function.get("arguments"), f"{here}.arguments")
    return tool_calls


def _arguments(arguments: Any, place: str) -> dict[str, Any]:
    """The object behind arguments, which may be its text; empty text and null stand for no arguments."""
    if arguments is None or arguments == "":
        return {}
    try:
        value = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise InvalidRequestError(f"{place} is not the text of a JSON object: {error}.", param=place) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{place} must be a JSON object, or its text.", param=place)
    return value


def with_arguments(conversation: Sequence[dict[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """The same messages with the arguments of all calls as objects, or as text. Only after `check_tool_calls`."""
    return [
        _with_arguments(message, as_text=as_text) if "tool_calls" in message else message for message in conversation
    ]


def _with_arguments(message: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        given = call["function"].get("arguments")
        arguments: Any = _arguments(given, "arguments")
        if as_text:
            arguments = given if isinstance(given, str) and given else json.dumps(arguments, ensure_ascii=False)
        whole = {**call, "function": {**call["function"], "arguments": arguments}}
        calls.append({**whole, "type": "function"})
    return {**message, "tool_calls": calls}


def wants_text(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a template wants the arguments of calls as text.

    It does if it fails on an object but not on text, or if it shows an object as Python writes it.

    Args:
        render: the template over messages; raises InvalidRequestError where it fails.
    """

    def shown(*, as_text: bool) -> str | None:
        call = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": _PROBE}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": "call00001", "name": "probe"},
        ]
        try:
            return render(with_arguments(messages, as_text=as_text))
        except InvalidRequestError:
            return None

    of_object = shown(as_text=False)
    if of_object is None:
        return shown(as_text=True) is not None
    return str(_PROBE) in of_object


def tools_text(tools: Sequence[Any]) -> str:
    """What the system message says about tools, for a template that cannot say it."""
    return _TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def with_tools_as_text(conversation: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The same messages, with the tools in the first one, which becomes a system message if it is none."""
    text = tools_text(tools)
    if conversation[0]["role"] == "system":
        first = {**conversation[0], "content": f"{conversation[0]['content']}\n\n{text}"}
        return [first, *conversation[1:]]
    return [{"role": "system", "content": text}, *conversation]


def with_calls_as_text(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with the calls in their text."""
    messages = []
    for message in conversation:
        if "tool_calls" in message:
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**rest, "content": "\n".join([message["content"], *calls] if message["content"] else calls)}
        messages.append(message)
    return messages


def _call_text(function: Mapping[str, Any]) -> str:
    said = {"name": function["name"], "arguments": _arguments(function.get("arguments"), "arguments")}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"


def with_results_as_text(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with the results of tools said by the user; results in a row are one message."""
    messages: list[dict[str, Any]] = []
    follows_result = False
    for message in conversation:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            before = messages.pop()["content"] + "\n" if follows_result else ""
            message = {"role": "user", "content": before + text}
        messages.append(message)
        follows_result = is_result
    return messages

"""Checking chat messages before a template sees them.

Where it stands: between what a client sent and `ChatTemplate.render`. OpenAI's message format comes in, plain JSON
values with string contents go out.

What always holds: whatever is wrong raises `InvalidRequestError` that names the place (`messages[2].content[0].type`);
the caller's objects are never changed; the template sees no objects but str, int, float, bool, None, list and dict.

In vLLM: `vllm/entrypoints/chat_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from mini_vllm.errors import InvalidRequestError
from mini_vllm.tokenizer.tool_messages import check_tool_calls

_MAX_DEPTH = 100  # far under Python's recursion limit, far over any tool's schema
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalize_messages(messages: Any, is_known_role: Callable[[str], bool]) -> list[dict[str, Any]]:
    """Check the messages of a request and bring them into the form that templates expect.

    Content parts are joined to one string. A content that is null or missing becomes "" where that is allowed: in an
    assistant's message, which may have nothing but tool calls. Other fields that are null are left out, since many
    templates only ask whether a field is there.

    Args:
        messages: what the client sent.
        is_known_role: whether the model has this role beside OpenAI's.

    Raises:
        InvalidRequestError: `param` is the place, such as "messages" or "messages[0].role".
    """
    if not isinstance(messages, list):
        raise InvalidRequestError(f"messages must be a list, not {_kind(messages)}.", param="messages")
    if not messages:
        raise InvalidRequestError("messages is empty; at least one message is needed.", param="messages")
    return [_normalize_message(one, f"messages[{index}]", is_known_role) for index, one in enumerate(messages)]


def _normalize_message(message: Any, place: str, is_known_role: Callable[[str], bool]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{place} must be an object with role and content, not {_kind(message)}.", param=place
        )
    role = message.get("role")
    if not isinstance(role, str) or not (role in _ROLES or is_known_role(role)):
        raise InvalidRequestError(
            f"{place}.role must be one of {', '.join(_ROLES)}, or a role that the model's chat template names; got "
            f"{str(role)[:80]!r}.",
            param=f"{place}.role",
        )
    rest = {name: plain_json(value, f"{place}.{name}") for name, value in message.items() if value is not None}
    if "tool_calls" in rest and not check_tool_calls(rest["tool_calls"], f"{place}.tool_calls"):
        del rest["tool_calls"]  # an empty list says the same as none
    return {**rest, "role": role, "content": _content(message.get("content"), role, f"{place}.content")}


def _content(content: Any, role: str, place: str) -> str:
    """The content as one string."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))
    if content is None and role == "assistant":
        return ""
    if content is None:
        raise InvalidRequestError(f"{place} is missing; only an assistant's message may lack it.", param=place)
    raise InvalidRequestError(f"{place} must be a string or a list of text parts, not {_kind(content)}.", param=place)


def _part_text(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{place} must be an object with type and text, not {_kind(part)}.", param=place)
    part_type = part.get("type")
    if not isinstance(part_type, str) or part_type not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{place}.type is {part_type!r}; this model reads text only, so parts must be "
            '{"type": "text", "text": ...}.',
            param=f"{place}.type",
        )
    text = part.get(_TEXT_PARTS[part_type])
    if not isinstance(text, str):
        field = f"{place}.{_TEXT_PARTS[part_type]}"
        raise InvalidRequestError(f"{field} must be a string, not {_kind(text)}.", param=field)
    return text


def plain_json(value: Any, place: str, depth: int = 0) -> Any:
    """A copy made of plain JSON types, so that no method of a caller's object is within a template's reach.

    Args:
        value: what the caller gave.
        place: where it stands in the request, for errors.
        depth: how many lists and objects it stands in.

    Raises:
        InvalidRequestError: something that JSON does not have, or nested deeper than 100.
    """
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(
            f"{place[:60]}... is nested deeper than {_MAX_DEPTH} lists and objects.", param=re.split(r"[.\[]", place)[0]
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(name): plain_json(item, f"{place}.{name}", depth + 1) for name, item in value.items()}
    raise InvalidRequestError(f"{place} must be made of JSON values, not {_kind(value)}.", param=place)


def _kind(value: Any) -> str:
    """A JSON name for a value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)

"""OpenAI's `response_format`, in the words of the engine.

Where it stands: `protocol.py` asks it when it makes sampling parameters.

    {"type": "text"}                                         -> None
    {"type": "json_object"}                                  -> any JSON object
    {"type": "json_schema", "json_schema": {"schema": ...}}  -> that schema; it is enforced with and without `strict`

In vLLM: `get_structured_outputs...` of the request classes in `vllm/entrypoints/openai/*/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mini_vllm.api.errors import shown
from mini_vllm.structured_outputs import StructuredOutputsParams, refuse

PARAM = "response_format"


def form_of(response_format: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The form it asks for; None for free text.

    Raises:
        InvalidRequestError: for a type that does not exist, or a schema that is none.
    """
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, origin=PARAM)
    if kind != "json_schema":
        raise refuse(f"type must be text, json_object or json_schema; got {shown(kind)}", PARAM)
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        raise refuse(
            f"json_schema must be an object with a JSON schema, an object, as `schema`; got {shown(wrapper)}", PARAM
        )
    return StructuredOutputsParams(json=schema, origin=PARAM)

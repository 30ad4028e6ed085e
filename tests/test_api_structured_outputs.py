"""Structured output over HTTP: OpenAI's and vLLM's forms, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from api_helpers import Served, serving
from engine_doubles import tiny_transformer

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
BROKEN = {"regex": "*("}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_transformer()) as server:
        yield server


@pytest.mark.parametrize(
    ("form", "text"),
    [({"choice": ["only"]}, "only"), ({"regex": "^a{3}$"}, "aaa"), ({"grammar": 'root ::= "x" "y"'}, "xy")],
    ids=str,
)
def test_structured_outputs_plain_and_streamed(served: Served, form: dict[str, Any], text: str) -> None:
    choice = served.complete(structured_outputs=form, max_tokens=40)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    streamed = served.stream_complete(structured_outputs=form, max_tokens=40)
    assert (streamed.text(), streamed.finish_reasons()) == (text, ["stop"])


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_json_schema_as_object_and_as_text(served: Served, schema: Any) -> None:
    choice = served.complete(structured_outputs={"json": schema}, max_tokens=40)["choices"][0]
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert choice["finish_reason"] == "stop"


def test_response_format_json_schema_plain_and_streamed(served: Served) -> None:
    choice = served.chat(response_format=JSON_SCHEMA, max_tokens=40)["choices"][0]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    streamed = served.stream_chat(response_format=JSON_SCHEMA, max_tokens=40)
    assert streamed.text() == choice["message"]["content"] and streamed.finish_reasons() == ["stop"]


def test_response_format_json_object_begins_an_object_and_says_when_it_is_cut(served: Served) -> None:
    choice = served.chat(response_format={"type": "json_object"}, max_tokens=1)["choices"][0]
    assert choice["message"]["content"].startswith("{") and choice["finish_reason"] == "length"


def test_response_format_text_changes_nothing(served: Served) -> None:
    assert served.chat(response_format={"type": "text"})["choices"] == served.chat()["choices"]


def test_forms_in_one_batch_do_not_mix(served: Served) -> None:
    forms: list[dict[str, Any] | None] = [{"choice": ["left", "right"]}, {"regex": "[0-9]{5}"}, {"json": SCHEMA}, None]

    def text(form: dict[str, Any] | None) -> str:
        return str(served.complete(structured_outputs=form, max_tokens=30)["choices"][0]["text"])

    alone = [text(form) for form in forms]
    with ThreadPoolExecutor(8) as pool:
        refused = [pool.submit(served.post, "/v1/completions", {"prompt": "a", "structured_outputs": BROKEN})] * 2
        assert list(pool.map(text, forms * 2)) == alone * 2
    assert [one.result().status_code for one in refused] == [400, 400]


def test_two_ways_to_ask_for_a_form_are_one_too_many(served: Served) -> None:
    body = {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    response = served.post("/v1/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"


def test_a_form_that_leaves_no_token_is_the_clients_fault(served: Served) -> None:
    body = {"prompt": "a", "structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [65]}
    response = served.post("/v1/completions", body)
    assert response.status_code == 400 and "structured_outputs" in response.json()["error"]["message"]
    served.wait_until_quiet()

"""What is refused, how, and that nothing a client sends is answered with a 5xx."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import httpx
import pytest
import schemathesis
from api_helpers import Served, serving, strict_json, until
from engine_doubles import tiny_transformer
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from mini_vllm import json_text
from mini_vllm.api import middleware
from mini_vllm.api.errors import BodyError
from mini_vllm.api.json_body import MOST_VALUES, JsonRequest
from mini_vllm.api.middleware import OPEN_PATHS
from mini_vllm.api.responses import ErrorAnswer


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_transformer(), server={"max_body_size": 200_000}, max_num_seqs=4) as server:
        yield server


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    answer = strict_json(response.text)
    ErrorAnswer.model_validate(answer)
    assert response.headers["x-request-id"]
    return answer["error"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.5, "0.5", True, [], {}, 1e7)),
        *(("top_p", value) for value in (0, 1.5, "1", False)),
        *(("top_k", value) for value in (-2, 1.5, "many")),
        *(("min_p", value) for value in (2, -0.1)),
        *(("repetition_penalty", value) for value in (0, -1)),
        *(("presence_penalty", value) for value in (3, -3)),
        ("frequency_penalty", 2.5),
        *(("n", value) for value in (0, 10**6, "2", 1.0, 5)),
        *(("best_of", value) for value in (0, 2, "2")),
        *(("max_tokens", value) for value in (-1, "5", 1.5, [], 0, 10_000, 2**70)),
        *(("min_tokens", value) for value in (-1, 17)),
        *(("seed", value) for value in ("x", 1.5, 2**64)),
        *(("stop", value) for value in ("", [""], 5, [1], {"a": 1}, ["x"] * 65)),
        *(("stop_token_ids", value) for value in ("x", [-1], [10**6], [1.5])),
        *(("logit_bias", value) for value in ({"9999": 5}, {"-1": 1}, {"abc": 1}, {"5": 101}, {"5": None}, [1], "x")),
        *(("bad_words", value) for value in ([""], "x", [5])),
        *(("allowed_token_ids", value) for value in ([], [9999], "x")),
        *(("logprobs", value) for value in (21, -1, "many", True)),
        ("prompt_logprobs", -1),
        *(("stream", value) for value in ("maybe", {}, 1)),
        *(("echo", value) for value in ("perhaps", 1)),
        ("ignore_eos", [1]),
        *(("cache_salt", value) for value in ("", 5, [], {})),
        *(("priority", value) for value in ("high", 1.5)),
        ("stream_options", {"include_usage": True}),
        ("stream_options", 5),
        ("suffix", "the end"),
        *(("structured_outputs", value) for value in ("json", {}, {"choice": []}, {"regex": "(["}, {"nonsense": 1})),
        *(("structured_outputs", value) for value in ({"json": {"type": "zzz"}}, {"grammar": "root ::= ((("})),
        *(("response_format", value) for value in ("json_object", {}, {"type": "poem"}, {"type": "json_schema"})),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": "nope"}}),
        ("model", 5),
        *(("prompt", value) for value in ([], [[]], [""], "", 5, True, {"a": 1}, [None], ["a", 1], [["a"]])),
        *(("prompt", value) for value in ([259], [-1], [[5, -1]], [1.5], [2**63], [2**100], [True], [5, "a"])),
        ("prompt", [5] * 257),
        ("prompt", "x" * 5000),
        ("stop", ["x"] * 5000),
        ("bad_words", ["x"] * 5000),
        ("logit_bias", {str(number): 1 for number in range(5000)}),
        ("structured_outputs", {str(number): 1 for number in range(5000)}),
        ("stop_token_ids", [1] * 9000 + ["x"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_value_is_a_400_that_names_the_field(served: Served, name: str, value: Any) -> None:
    error = refused(served.post("/v1/completions", {"prompt": "ab", name: value}))
    assert error["param"] == name and name in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "1" * 400])
def test_what_is_no_number_is_refused_by_the_field_it_is_in(served: Served, literal: str) -> None:
    content = f'{{"prompt": "ab", "temperature": {literal}}}'
    response = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert refused(response)["param"] == "temperature"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": }', b"[" * 50_000, b"1" * 5000], ids=repr
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/generate"])
def test_a_broken_body_is_a_400(served: Served, path: str, content: bytes) -> None:
    refused(served.http.post(path, content=content, headers={"content-type": "application/json"}))


def test_a_body_of_another_type_is_a_400(served: Served) -> None:
    response = served.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert "application/json" in refused(response)["message"]


def test_a_missing_field_is_named(served: Served) -> None:
    assert refused(served.post("/v1/completions", {}))["param"] == "prompt"
    assert refused(served.post("/v1/chat/completions", {}))["param"] == "messages"


@pytest.mark.parametrize(
    "name", ["temperature", "n", "max_tokens", "stream", "stop", "logprobs", "response_format", "best_of"]
)
def test_null_is_as_good_as_nothing(served: Served, name: str) -> None:
    assert (
        served.complete("ab", seed=1, **{name: None, "top_k": 1})["choices"]
        == served.complete("ab", top_k=1)["choices"]
    )


def test_a_wrong_model_is_a_404_that_lists_the_right_one(served: Served) -> None:
    error = refused(served.post("/v1/completions", {"model": "gpt-9", "prompt": "a"}), 404)
    assert error["param"] == "model" and error["code"] == "model_not_found"
    assert "gpt-9" in error["message"] and "double" in error["message"]
    assert served.complete("ab", model="double", max_tokens=1)


def test_half_a_surrogate_pair_becomes_a_replacement_character(served: Served) -> None:
    content = b'{"prompt": "a\\ud83d", "max_tokens": 1, "echo": true}'
    response = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.json()["choices"][0]["text"].startswith("a\ufffd")


def test_fields_without_effect_are_accepted_and_unknown_ones_are_named_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mini_vllm"):
        served.complete("ab", max_tokens=1, user="me", metadata={"a": "b"}, tools=[], suffix=None, best_of=1)
        assert caplog.messages == []
        served.complete("ab", max_tokens=1, shiny=5)
    assert caplog.messages == ["ignoring the unknown request field 'shiny'"]


def test_a_body_of_thousands_of_fields_is_refused(served: Served) -> None:
    body = {"prompt": "ab", **{f"field{number}": 1 for number in range(5000)}}
    assert "5001 fields" in refused(served.post("/v1/completions", body))["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"1," * MOST_VALUES + b"1]}",
        b'{"x": [' + b"[1]," * (MOST_VALUES // 2) + b"1]}",
        b'{"prompt": [' + b'"",' * MOST_VALUES + b'""]}',
        ('{"prompt": [' + "1," * MOST_VALUES + "1]}").encode("utf-16"),
    ],
    ids=["numbers", "lists", "texts", "utf-16"],
)
def test_more_values_than_any_request_needs_are_refused_unread(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them would hold everybody up, and nothing can interrupt it."""
    monkeypatch.setattr(json_text, "parse_json", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(BodyError, match="524288 values"):
        asyncio.run(read_body(body))


def test_what_stands_inside_of_a_text_is_no_value() -> None:
    body = {"prompt": 'a, [b], {"c": "\\"}, ' * 200_000, "more": ["\\", '"']}
    assert asyncio.run(read_body(json.dumps(body).encode())) == body


def test_others_have_a_turn_between_the_steps_of_reading_a_large_body(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ["count"]
    read = json_text.parse_json
    monkeypatch.setattr(json_text, "parse_json", lambda *a, **b: steps.append("read") or read(*a, **b))

    async def reader() -> None:
        await read_body(b'{"prompt": "' + b"x" * 100_000 + b'"}')
        steps.append("use")

    async def other() -> None:
        while steps[-1] != "use":
            steps.append("turn")
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(reader(), other())

    asyncio.run(both())
    assert [step for step, _ in groupby(steps)] == ["count", "turn", "read", "turn", "use"]


async def read_body(body: bytes) -> Any:
    """What a route gets of a body."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return await JsonRequest({"type": "http", "headers": []}, receive).json()


def test_of_many_unknown_fields_the_log_names_the_first(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mini_vllm"):
        served.complete("ab", max_tokens=1, **{f"field{number}": 1 for number in range(20)})
    assert len(caplog.messages) == 17 and caplog.messages[-1] == "ignoring 4 more unknown request fields"


@pytest.mark.parametrize("messages", [[1] * 9000, [{}] * 17_000, [{}, "x"]], ids=["1", "2", "3"])
def test_too_many_messages_and_those_that_are_none_are_refused_by_one_error(served: Served, messages: Any) -> None:
    error = refused(served.post("/v1/chat/completions", {"messages": messages}))
    assert error["param"] == "messages" and len(error["message"]) < 400


def test_masks_that_leave_no_token_are_the_clients_fault(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": "ab", "allowed_token_ids": [97], "bad_words": ["a"]})
    assert "leave no token" in refused(response)["message"]
    served.wait_until_quiet()


def test_a_refused_stream_is_a_status_and_not_an_event(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": [9999], "stream": True})
    assert refused(response)["param"] == "prompt" and response.headers["content-type"] == "application/json"


def test_unknown_paths_and_methods(served: Served) -> None:
    refused(served.post("/v1/nothing", {}), 404)
    refused(served.http.get("/v1/completions"), 405)
    refused(served.http.get("/v1/models/"), 404)
    odd = [("HEAD", "/v1/models"), ("DELETE", "/v1/completions"), ("PATCH", "/health"), ("GET", "/../etc/passwd")]
    for method, path in [*odd, ("GET", "/v1/models/%2e%2e%2f"), ("GET", "/" + "a" * 5000), ("BREW", "/health")]:
        assert 400 <= served.http.request(method, path).status_code < 500, (method, path)
    assert served.post("/v1/completions?x=1", {"prompt": "ab", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("declares_length", [True, False])
def test_a_body_over_the_limit_is_a_413(served: Served, declares_length: bool) -> None:
    body = json.dumps({"prompt": "x" * 300_000}).encode()
    content = body if declares_length else iter([body[:150_000], body[150_000:]])
    response = served.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert "200000 bytes" in refused(response, 413)["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing"])
def test_who_is_refused_while_still_sending_can_send_on_and_gets_the_whole_answer(served: Served, path: str) -> None:
    """The connection is to be closed; closed at once, it would be reset, and the answer might be lost."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3000000\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.recv(65_536)
        for _ in range(30):
            connection.sendall(b"x" * 100_000)
        while more := connection.recv(65_536):
            answer += more
    assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 404 ")) and answer.endswith(b"}}")


def test_who_is_refused_and_goes_on_sending_for_ever_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "LINGER", 0.2)
    with serving() as served:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 9\r\n\r\n"
            )
            answer = b""
            while more := connection.recv(65_536):
                answer += more
        assert answer.startswith(b"HTTP/1.1 404 ") and answer.endswith(b"}}")


def test_a_request_id_comes_back_unless_it_could_harm_the_log(served: Served) -> None:
    assert served.http.get("/version", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert served.http.get("/version", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"] != "a b\tc"
    bodies = [served.post("/generate", {"prompt": "a"}, headers={"X-Request-Id": "same"}).json() for _ in range(2)]
    assert bodies[0]["id"] != bodies[1]["id"]


def test_the_log_has_a_line_a_request_without_its_text(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mini_vllm.access"):
        body = {"prompt": "secret", "max_tokens": 2, "ignore_eos": True}
        served.post("/v1/completions", body, headers={"X-Request-Id": "r1"})
        served.post("/v1/completions", {"prompt": [-1]}, headers={"X-Request-Id": "r2"})
        until(lambda: len(caplog.messages) == 2, "the lines, which are written after the answers")
    first, second = caplog.messages
    assert first.startswith("POST /v1/completions 200 in ") and "id=r1" in first and "6 + 2 tokens" in first
    assert "400" in second and "id=r2" in second and "token id -1" in second
    assert "secret" not in caplog.text


KEYS = {"api_key": ("sesame", "open-up")}


def test_every_route_but_health_needs_a_key() -> None:
    """A new route fails this test unless it is refused as well."""
    with serving(server=KEYS) as guarded:
        paths = guarded.http.get("/openapi.json", headers={"Authorization": "Bearer sesame"}).json()["paths"]
        tried = [(method, path) for path, operations in paths.items() for method in operations]
        assert len(tried) >= 9
        tried += [("get", "/docs"), ("get", "/openapi.json"), ("get", "/redoc"), ("post", "//v1/completions")]
        tried += [
            ("post", "/v1/completions/"),
            ("head", "/v1/models"),
            ("options", "/v1/completions"),
            ("get", "/nothing"),
        ]
        for method, path in tried:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "sesame"},
                {"Authorization": "Bearersesame"},
            ):
                response = guarded.http.request(method, path, headers=headers)
                if path in OPEN_PATHS:
                    assert response.status_code == 200
                elif method == "head":
                    assert response.status_code == 401
                else:
                    assert refused(response, 401)["code"] == "invalid_api_key", (method, path)


@pytest.mark.parametrize("header", ["Bearer sesame", "Bearer open-up", "bearer sesame"])
def test_any_of_the_keys_opens(header: str) -> None:
    with serving(server=KEYS) as guarded:
        assert guarded.http.get("/v1/models", headers={"Authorization": header}).status_code == 200


def test_pages_of_other_origins_may_call_only_where_they_are_allowed(served: Served) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in served.http.options("/v1/completions", headers=asked).headers
    with serving(server={**KEYS, "allowed_origins": ("https://a.example",)}) as open_server:
        answer = open_server.http.options("/v1/completions", headers=asked)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"


def test_fuzzing_from_the_servers_own_description_finds_no_5xx(served: Served) -> None:
    """Schemathesis makes requests from /openapi.json, right and wrong ones, and holds each answer against it."""
    schema = schemathesis.openapi.from_url(served.url + "/openapi.json")
    checks = [not_a_server_error, response_schema_conformance, content_type_conformance]
    few = settings(
        max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )

    def fuzz(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=checks)

    for found in schema.get_all_operations():
        operation = found.ok()
        kinds = operation.as_strategy(GenerationMode.POSITIVE), operation.as_strategy(GenerationMode.NEGATIVE)
        for strategy in kinds if operation.body else kinds[:1]:
            few(given(case=strategy)(fuzz))()
    served.wait_until_quiet()

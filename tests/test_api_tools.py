"""Tools over HTTP: auto, none, required, a named function; whole and streamed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from api_helpers import Served, Streamed, serving, until
from engine_doubles import ScriptedModel, byte_tokenizer, tiny_transformer
from engine_doubles import says as script

from mini_vllm.api.responses import ChatChunk, ChatCompletion

TEMPLATE = (
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
    "{# 'tool' tool_calls <tool_call> #}"
)
COLOUR = {"type": "object", "properties": {"c": {"enum": ["red", "é🫠"]}}, "required": ["c"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "description": "The time"}},
    {"type": "function", "function": {"name": "pick", "parameters": COLOUR}},
]
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
MUST = {"tool_choice": "required"}
NESTED: dict[str, Any] = {"type": "object"}
for _ in range(200):
    NESTED = {"type": "object", "properties": {"a": NESTED}}
NAMED = {"type": "function", "function": {"name": "pick"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    parts = {"tokenizer": byte_tokenizer(TEMPLATE), "max_model_len": 1024}
    with serving(tiny_transformer(), parts=parts) as one:
        yield one


def function_with(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def says(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}}


def tag(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def calls_of(streamed: Streamed, index: int = 0) -> list[tuple[str, Any]]:
    calls = [call for one in streamed.choices(index) for call in one["delta"].get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def both(served: Served, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message, which is the same streamed and whole, and its finish reason."""
    answer = served.chat("hi", **fields)
    ChatCompletion.model_validate(answer)
    (choice,) = answer["choices"]
    streamed = served.stream_chat("hi", **fields)
    for chunk in streamed.chunks:
        ChatChunk.model_validate(chunk)
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert calls_of(streamed) == [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert streamed.text() == (message["content"] or "") and streamed.finish_reasons() == [choice["finish_reason"]]
    assert len({call["id"] for call in calls}) == len(calls)
    return message, choice["finish_reason"]


def names_and_arguments(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]]


def test_calls_and_the_text_before_them(served: Served) -> None:
    text = "Let me look. " + tag("get_time", "{}") + "\n" + tag("pick", '{"c": "}{</tool_call>"}')
    message, reason = both(served, tools=TOOLS, **says(text))
    assert names_and_arguments(message) == [("get_time", {}), ("pick", {"c": "}{</tool_call>"})]
    assert (message["content"], reason) == ("Let me look.", "tool_calls")


def test_a_message_of_calls_alone_has_no_content(served: Served) -> None:
    message, _ = both(served, tools=TOOLS, **says(tag("get_time", "{}")))
    assert message["content"] is None and message["tool_calls"][0]["id"].startswith("call_")


@pytest.mark.parametrize("text", ["plain", "<tool_call>\nnot json\n</tool_call>", tag("unknown", "{}")])
def test_what_is_no_call_is_content(served: Served, text: str) -> None:
    message, reason = both(served, tools=TOOLS, **says(text))
    assert (message["content"], reason) == (text, "stop") and "tool_calls" not in message


def test_tool_choice_none_calls_nothing_and_does_not_show_the_tools(served: Served) -> None:
    text = tag("get_time", "{}")
    message, reason = both(served, tools=TOOLS, tool_choice="none", **says(text))
    assert (message["content"], reason) == (text, "stop")
    assert prompt(served, tools=TOOLS, tool_choice="none") == prompt(served)
    assert prompt(served, tools=TOOLS) == "(get_time)(pick)" + prompt(served)


def prompt(served: Served, **fields: Any) -> str:
    chat = served.chat("hi", max_tokens=1, return_token_ids=True, **fields)
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert served.ok("/tokenize", body)["tokens"] == chat["prompt_token_ids"]
    return bytes(chat["prompt_token_ids"]).decode()


@pytest.mark.parametrize("seed", range(3))
def test_required_gives_calls_whatever_the_model_says(served: Served, seed: int) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": seed}
    message, reason = both(served, **fields)
    ((name, arguments),) = names_and_arguments(message)
    jsonschema.validate(arguments, COLOUR if name == "pick" else {"maxProperties": 0})
    assert (message["content"], reason) == (None, "tool_calls")


def test_a_named_function_is_called_once(served: Served) -> None:
    message, reason = both(served, tools=TOOLS, tool_choice=NAMED, temperature=1, seed=5)
    ((name, arguments),) = names_and_arguments(message)
    jsonschema.validate(arguments, COLOUR)
    assert (name, reason) == ("pick", "tool_calls")


def test_each_of_n_answers_has_calls_of_its_own(served: Served) -> None:
    answer = served.chat("hi", tools=TOOLS, tool_choice=NAMED, temperature=1, seed=5, n=3)
    streamed = served.stream_chat("hi", tools=TOOLS, tool_choice=NAMED, temperature=1, seed=5, n=3)
    for choice in answer["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert calls_of(streamed, choice["index"]) == [(call["function"]["name"], call["function"]["arguments"])]
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("max_tokens", "begins"), [(5, False), (45, True)])
def test_a_cut_call_says_length_and_comes_as_far_as_it_went(served: Served, max_tokens: int, begins: bool) -> None:
    message, reason = both(served, tools=TOOLS, tool_choice=NAMED, max_tokens=max_tokens)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "pick" and call["function"]["arguments"].startswith("{") == begins
    assert reason == "length"


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"tools": TOOLS}, [("get_time", {"a": 1}), ("get_time", {})]),
        ({"tools": STRICT}, [("get_time", {}), ("get_time", {})]),
        ({"tools": TOOLS, "parallel_tool_calls": False}, [("get_time", {"a": 1})]),
    ],
    ids=["free", "strict", "one"],
)
def test_under_auto_a_grammar_holds_what_was_promised(fields: dict[str, Any], calls: list[tuple[str, Any]]) -> None:
    text = "Hm. " + tag("get_time", '{"a": 1}') + "\n" + tag("get_time", "{}")
    model = ScriptedModel(script([*text.encode()], len("(get_time)(pick)<user>hi\n<assistant>")))
    with serving(model, parts={"tokenizer": byte_tokenizer(TEMPLATE), "max_model_len": 1024}) as one:
        message, reason = both(one, **fields)
        assert names_and_arguments(message) == calls and message["content"].startswith("Hm.") and reason == "tool_calls"


def test_response_format_is_the_form_of_the_answer_that_calls_nothing(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "noon"}}}
    message, reason = both(served, tools=TOOLS, response_format=form, logit_bias={str(ord('"')): 100})
    assert (message["content"], reason) == ('"noon"', "stop")
    message, reason = both(
        served, tools=TOOLS[:1], parallel_tool_calls=False, response_format=form, logit_bias={str(ord("<")): 100}
    )
    assert names_and_arguments(message) == [("get_time", {})] and reason == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOLS[0], function_with(NESTED)]}, "tools[1].function.parameters"),
        *(
            (
                {"tools": [*TOOLS, function_with({"properties": {"a": wrong}, "required": ["a"]})], **MUST},
                "tools[2].function.parameters",
            )
            for wrong in ({"uniqueItems": True}, {"pattern": "(["})
        ),
        ({"tools": TOOLS[:1] * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters",
        ),
    ],
    ids=range(16),
)
def test_bad_tools_are_refused_by_field(served: Served, fields: dict[str, Any], param: str) -> None:
    response = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"parameters": 5}, "tools[1].function.parameters (of 'dig') must be a JSON schema"),
        ({"parameters": {"type": "array"}}, "tools[1].function.parameters.type (of 'dig') must be object"),
        ({"parameters": {"x": "y" * 70_000}}, "tools[1].function.parameters (of 'dig'): json has"),
        ({"description": 5}, "tools[1].function.description (of 'dig') must be a text"),
        ({"strict": 5}, "tools[1].function.strict (of 'dig') must be true or false"),
        ({"parameters": {"required": ["a"], "properties": {"a": {"pattern": "(["}}}}, "parameters (of 'dig'): "),
    ],
)
def test_a_bad_tool_is_named(served: Served, function: dict[str, Any], message: str) -> None:
    tools = [TOOLS[0], {"type": "function", "function": {"name": "dig", **function}}]
    fields = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, **MUST}
    assert message in served.post("/v1/chat/completions", fields).json()["error"]["message"]


def test_a_schema_with_nan_is_refused_in_words_of_json(served: Served) -> None:
    tool = json.dumps(function_with({"properties": {"a": {"default": math.nan}}}))
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "tools": [{tool}]}}'
    response = served.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "tools[0].function.parameters"
    assert "NanOrInfinity is not JSON" in error["message"]


def test_a_stop_string_ends_a_text_and_never_a_forced_call(served: Served) -> None:
    fields = {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200, "stop": ['"', "pick", "r", "é"]}
    message, reason = both(served, **fields)
    assert reason == "tool_calls"
    jsonschema.validate(json.loads(message["tool_calls"][0]["function"]["arguments"]), COLOUR)
    message, reason = both(served, tools=TOOLS, stop=["now"], **says("Not now"))
    assert (message["content"], reason) == ("Not ", "stop")


def test_tools_can_be_switched_off() -> None:
    with serving(server={"tool_call_parser": "none"}) as off:
        response = off.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS})
        assert response.status_code == 400 and "--tool-call-parser" in response.json()["error"]["message"]


def test_reasoning_is_shown_apart() -> None:
    parts = {"tokenizer": byte_tokenizer(TEMPLATE), "max_model_len": 1024}
    with serving(tiny_transformer(), parts=parts, server={"reasoning_parser": "deepseek_r1"}) as thinker:
        message = thinker.chat("hi", max_tokens=20)["choices"][0]["message"]
        assert message["reasoning_content"] and message["content"] == ""
        streamed = thinker.stream_chat("hi", max_tokens=20)
        thought = "".join(one["delta"].get("reasoning_content", "") for one in streamed.choices())
        assert thought == message["reasoning_content"] and streamed.text() == ""
        formed = thinker.chat("hi", **says("noon"))["choices"][0]["message"]
        assert formed["content"] == "noon" and "reasoning_content" not in formed


def test_a_form_that_compiles_for_seconds_holds_nobody_up(served: Served) -> None:
    patterns = [{"type": "string", "pattern": f"(a|b)*c{{{count}}}.*"} for count in range(1, 30)]
    slow = {"prompt": "x", "structured_outputs": {"json": {"allOf": patterns}}}
    with ThreadPoolExecutor(3) as clients:
        refused = [clients.submit(served.post, "/v1/completions", {**slow, "seed": seed}) for seed in range(3)]
        until(lambda: grammar_trial_is_busy(served), "the trial")
        assert served.complete("ab", max_tokens=2)["usage"]["completion_tokens"] == 2
        assert not any(one.done() for one in refused)
        for one in refused:
            response = one.result()
            assert response.status_code == 400 and "to compile" in response.json()["error"]["message"]


def grammar_trial_is_busy(served: Served) -> bool:
    return served.engine._input_processor._grammars._trial_lock.locked()

"""What agents are built from, with the official client: parsed answers, streamed calls, and the loop of examples/."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from api_helpers import Served, serving
from engine_doubles import byte_tokenizer, tiny_transformer

from mini_vllm import LLMEngine

HI = [{"role": "user", "content": "hi"}]


class Colour(str, Enum):
    RED = "red"
    BLUE = "blue"


class Wheel(pydantic.BaseModel):
    size: int = pydantic.Field(ge=1, le=99)
    colour: Colour | None


class Car(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    wheels: list[Wheel] = pydantic.Field(min_length=1, max_length=3)
    is_new: bool


class Pick(pydantic.BaseModel):
    """Pick a colour."""

    colour: Colour


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    parts = {"tokenizer": byte_tokenizer(template), "max_model_len": 1024}
    with serving(tiny_transformer(), parts=parts) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_parsed_into_a_pydantic_model(client: openai.OpenAI, seed: int) -> None:
    completion = client.chat.completions.parse(
        model="double", messages=HI, response_format=Car, temperature=1, seed=seed, max_tokens=400
    )
    car = completion.choices[0].message.parsed
    assert isinstance(car, Car) and 1 <= len(car.wheels) <= 3


def test_a_streamed_answer_is_parsed_too(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="double", messages=HI, response_format=Car, temperature=1, seed=1, max_tokens=400
    ) as stream:
        completion = stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, Car)


def test_arguments_are_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="double", messages=HI, tools=[openai.pydantic_function_tool(Pick)], tool_choice="required",
        parallel_tool_calls=False, temperature=1, seed=1, max_tokens=200,
    )  # fmt: skip
    (call,) = completion.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Pick)


def test_an_answer_cut_by_max_tokens_is_told_from_a_whole_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="double", messages=HI, response_format=Car, max_tokens=5)


def test_a_schema_that_cannot_be_enforced_is_refused_by_the_field_it_came_in(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(model="double", messages=HI, response_format=form)
    assert refused.value.param == "response_format"


def test_streamed_calls_are_put_together_by_the_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="double", messages=HI, tools=[openai.pydantic_function_tool(Pick)], tool_choice="required",
        parallel_tool_calls=False, temperature=1, seed=1, max_tokens=200,
    ) as stream:  # fmt: skip
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")


def test_the_agent_of_the_examples_calls_both_tools_with_the_default_model(smollm2_files: Any) -> None:
    path = Path(__file__).parents[1] / "examples" / "agent_loop.py"
    spec = importlib.util.spec_from_file_location("agent_loop", path)
    assert spec is not None and spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    with serving(load=lambda: LLMEngine(num_kv_blocks=128, max_model_len=1024)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        messages = agent.run(client, "smollm2-135m-instruct", "What time is it in Tokyo, and how warm is it there?")
    names = [call["function"]["name"] for one in messages for call in one.get("tool_calls", ())]
    assert sorted(names) == ["get_time", "get_weather"]
    assert [one["role"] for one in messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert messages[-1]["content"]

"""The official Python client works unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from api_helpers import Served, serving

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(server={"api_key": ("sesame",)}) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="sesame", max_retries=0) as one:
        yield one


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["double"]


def test_completions_plain_and_streamed(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="double", prompt="ab", max_tokens=5, temperature=0, logprobs=1)
    assert plain.choices[0].text == "cdefg" and plain.choices[0].logprobs.tokens == list("cdefg")
    stream = client.completions.create(model="double", prompt="ab", max_tokens=5, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "cdefg"


def test_chat_plain_and_streamed(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="double", messages=HI, max_tokens=5, temperature=0, logprobs=True, top_logprobs=1
    )
    assert plain.choices[0].message.content and len(plain.choices[0].logprobs.content) == 5
    stream = client.chat.completions.create(
        model="double", messages=HI, max_tokens=5, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content and chunks[-1].usage.total_tokens == plain.usage.total_tokens


def test_the_stream_helper_puts_the_same_message_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="double", messages=HI, temperature=0, stop="x") as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "uvw" and final.choices[0].finish_reason == "stop"


def test_the_async_client(served: Served) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="sesame") as client:
            stream = await client.completions.create(
                model="double", prompt="ab", max_tokens=4, temperature=0, stream=True, extra_body={"top_k": 5}
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(ask()) == "cdef"


def test_errors_are_the_clients_classes(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="double", messages=HI, temperature=-1)
    assert refused.value.param == "temperature"
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()

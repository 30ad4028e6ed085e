"""The official Python client: plain, streamed, with the stream helper, and asynchronous.

pip install openai
python openai_client.py            # BASE_URL and MODEL are read from the environment
"""

from __future__ import annotations

import asyncio
import os

import openai
from openai.types.chat import ChatCompletionMessageParam

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000") + "/v1"
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def main() -> None:
    client = openai.OpenAI(base_url=BASE_URL, api_key="none")
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    print("plain:     ", answer.choices[0].message.content)

    print("streamed:   ", end="")
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)

    with client.chat.completions.stream(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
    print("\nhelper:    ", text)

    # What OpenAI's API does not have goes into extra_body.
    completion = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, extra_body={"min_tokens": 4}
    )
    print("completion:", completion.choices[0].text)
    print("at once:   ", *asyncio.run(ask_at_once()), sep="\n  ")


async def ask_at_once() -> list[str | None]:
    """Several questions at the same time; the server batches them."""
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        questions = [f"What is the capital of {country}?" for country in ("Japan", "Italy", "Chile")]
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=16, temperature=0
                )
                for question in questions
            )
        )
    return [answer.choices[0].message.content for answer in answers]


if __name__ == "__main__":
    main()

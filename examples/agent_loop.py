"""An agent: the model calls two functions, is told what they gave, and answers.

    mini-vllm serve                       # in one terminal
    pip install openai                    # the official client; any other works as well
    python examples/agent_loop.py         # in another

The default model is far too small to plan, and still this works: under tool_choice="required" a grammar lets it write
nothing but calls whose arguments follow their schema. What it chooses is which function, and which arguments. A tool
that has been called is not offered again, so the loop ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

CITIES = ["Paris", "Tokyo", "Lima"]


def get_time(city: str) -> str:
    """What a real agent would ask somebody else."""
    return {"Paris": "14:05", "Tokyo": "21:05", "Lima": "07:05"}[city]


def get_weather(city: str, unit: str) -> str:
    degrees = {"Paris": 18, "Tokyo": 24, "Lima": 16}[city]
    return f"{degrees} °C" if unit == "celsius" else f"{degrees * 9 // 5 + 32} °F"


def tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


FUNCTIONS: dict[str, Callable[..., str]] = {"get_time": get_time, "get_weather": get_weather}
TOOLS = [
    tool("get_time", "The time in a city.", city={"enum": CITIES}),
    tool("get_weather", "The weather in a city.", city={"enum": CITIES}, unit={"enum": ["celsius", "fahrenheit"]}),
]


def run(client: openai.OpenAI, model: str, question: str) -> list[dict[str, Any]]:
    """Answer a question. Returns the whole conversation."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    tools = list(TOOLS)
    while tools:
        answer = ask(client, model, messages, tools=tools, tool_choice="required", parallel_tool_calls=False)
        messages.append(answer)
        for call in answer["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = FUNCTIONS[name](**arguments)
            print(f"{name}({', '.join(map(str, arguments.values()))}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            tools = [one for one in tools if one["function"]["name"] != name]
    messages.append(ask(client, model, messages, max_tokens=64))
    print(messages[-1]["content"])
    return messages


def ask(client: openai.OpenAI, model: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    completion = client.chat.completions.create(model=model, messages=messages, temperature=0, **options)
    return completion.choices[0].message.model_dump(exclude_none=True)


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = openai.OpenAI(base_url=base_url, api_key="none")
    run(client, client.models.list().data[0].id, "What time is it in Tokyo, and how warm is it there?")


if __name__ == "__main__":
    main()

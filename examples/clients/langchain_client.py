"""LangChain, plain and streamed.

pip install langchain-openai
python langchain_client.py         # BASE_URL and MODEL are read from the environment
"""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI
from pydantic import SecretStr

llm = ChatOpenAI(
    model=os.environ.get("MODEL", "smollm2-135m-instruct"),
    base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=SecretStr("none"),
    temperature=0,
    max_completion_tokens=24,
)
messages = [("system", "You answer shortly."), ("user", "What is the capital of France?")]

answer = llm.invoke(messages)
print("plain:   ", answer.text)
print("usage:   ", answer.usage_metadata)

print("streamed: ", end="")
for chunk in llm.stream(messages):
    print(chunk.text, end="", flush=True)
print()
print("batch:   ", [one.text for one in llm.batch(["Say yes.", "Say no."])])

"""LiteLLM, plain and streamed, chat and completion.

pip install litellm
python litellm_client.py           # BASE_URL and MODEL are read from the environment
"""

from __future__ import annotations

import os

import litellm

SERVER = {
    "model": "openai/" + os.environ.get("MODEL", "smollm2-135m-instruct"),
    "api_base": os.environ.get("BASE_URL", "http://127.0.0.1:8000") + "/v1",
    "api_key": "none",
}
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]

answer = litellm.completion(**SERVER, messages=MESSAGES, max_tokens=24, temperature=0)
print("plain:     ", answer.choices[0].message.content)
print("usage:     ", answer.usage.total_tokens, "tokens")

print("streamed:   ", end="")
for chunk in litellm.completion(**SERVER, messages=MESSAGES, max_tokens=24, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# The model name's prefix says which of the two APIs is meant.
SERVER["model"] = SERVER["model"].replace("openai/", "text-completion-openai/")
text = litellm.text_completion(**SERVER, prompt="The capital of France is", max_tokens=8, temperature=0)
print("completion:", text.choices[0].text)

"""/v1/chat/completions, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_helpers import Served, serving
from engine_doubles import ScriptedModel, byte_tokenizer, says

from mini_vllm.api.responses import ChatChunk, ChatCompletion

HI = "<user>hi\n<assistant>"  # what the template of the doubles makes of a user's "hi"


@pytest.fixture(scope="module")
def letters() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def speaker() -> Iterator[Served]:
    """Answers "hi" with "ď 🫠" and an end of sequence."""
    with serving(ScriptedModel(says([*"ď 🫠".encode()], len(HI)))) as served:
        yield served


def test_a_message_comes_back(speaker: Served) -> None:
    answer = speaker.chat("hi")
    ChatCompletion.model_validate(answer)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ď 🫠", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == len(HI) and answer["object"] == "chat.completion"


def test_a_stream_begins_with_the_role_and_sends_whole_characters(speaker: Served) -> None:
    streamed = speaker.stream_chat("hi")
    for chunk in streamed.chunks:
        ChatChunk.model_validate(chunk)
    deltas = [one["delta"] for one in streamed.choices()]
    assert deltas[0] == {"role": "assistant", "content": ""} and {} not in deltas[:-1]
    assert all("\ufffd" not in delta.get("content", "") for delta in deltas) and streamed.text() == "ď 🫠"
    assert streamed.finish_reasons() == ["stop"] and streamed.num_done == 1


def test_bytes_of_logprobs_join_to_the_text(speaker: Served) -> None:
    (choice,) = speaker.chat("hi", logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]
    assert [entry["token"] for entry in content] == ["", "ď", " ", "", "", "", "🫠", ""]
    assert content[0]["top_logprobs"][0]["token"] == "" and len(content[0]["top_logprobs"]) == 2
    streamed = speaker.stream_chat("hi", logprobs=True, top_logprobs=2)
    assert [entry for one in streamed.choices() if one["logprobs"] for entry in one["logprobs"]["content"]] == content


def test_logprobs_without_top_have_no_alternatives(letters: Served) -> None:
    (choice,) = letters.chat("hi", max_tokens=2, logprobs=True)["choices"]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


def test_an_answer_may_fill_the_context(letters: Served) -> None:
    answer = letters.chat("hi")
    assert answer["usage"]["total_tokens"] == 256 and answer["choices"][0]["finish_reason"] == "length"
    assert letters.chat("hi", max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_n_messages_stream_under_their_index(letters: Served) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 8}
    whole = letters.chat("hi", **fields)["choices"]
    streamed = letters.stream_chat("hi", **fields)
    assert [choice["message"]["content"] for choice in whole] == [streamed.text(index) for index in range(3)]
    assert len({choice["message"]["content"] for choice in whole}) == 3
    assert [len(streamed.finish_reasons(index)) for index in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "<user>hi\n<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi\n"),
        ({"continue_final_message": True}, "<user>hi"),
    ],
)
def test_template_options_reach_the_template(letters: Served, fields: dict[str, Any], prompt: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat = letters.ok(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
    )
    assert bytes(chat["prompt_token_ids"]).decode() == prompt
    assert letters.ok("/tokenize", {"messages": messages, **fields})["tokens"] == chat["prompt_token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 250}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"response_format": {"type": "poem"}}, "response_format"),
    ],
    ids=str,
)
def test_a_bad_chat_is_refused_by_field(letters: Served, fields: dict[str, Any], param: str) -> None:
    response = letters.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_model_without_template_still_completes() -> None:
    with serving(parts={"tokenizer": byte_tokenizer(chat_template=None)}) as served:
        response = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
        assert response.status_code == 400 and "--chat-template" in response.json()["error"]["message"]
        assert served.complete("ab", max_tokens=1)["choices"][0]["text"] == "c"


def test_tokenize_and_detokenize_are_inverse(letters: Served) -> None:
    tokens = letters.ok("/tokenize", {"prompt": "é<eos>", "return_token_strs": True})
    assert tokens == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [195, 169, 257],
        "token_strs": ["\ufffd", "\ufffd", "<eos>"],
    }
    assert letters.ok("/detokenize", {"tokens": [195, 169, 257]}) == {"prompt": "é<eos>"}
    response = letters.post("/detokenize", {"tokens": [5, 259]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "tokens"

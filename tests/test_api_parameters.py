"""Every parameter changes what it is there for, through every endpoint: none is accepted and then lost on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from api_helpers import Served, alphabet, serving
from engine_doubles import EOS, ScriptedModel

from mini_vllm.api.protocol import ChatBody, CompletionBody, GenerateBody

PATHS = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/generate": GenerateBody}
HOT = {"temperature": 5.0, "seed": 1}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "temperature": [HOT],
    "seed": [{**HOT, "seed": 2}],
    "max_tokens": [{"max_tokens": 5}],
    "stop": [{"stop": ["f"]}, {"stop": "x"}],
    "include_stop_str_in_output": [{"stop": ["ef"], "include_stop_str_in_output": True}],
    "stop_token_ids": [{"stop_token_ids": [ord("k")]}],
    "min_tokens": [{"stop_token_ids": [*range(97, 123)], "min_tokens": 5}],
    "logit_bias": [{"logit_bias": {str(ord("D")): 50}}],
    "bad_words": [{"bad_words": ["d"]}],
    "allowed_token_ids": [{"allowed_token_ids": [*range(65, 91)]}],
    "repetition_penalty": [{"repetition_penalty": 2.0}],
    "presence_penalty": [{"presence_penalty": 2.0}],
    "frequency_penalty": [{"frequency_penalty": 2.0}],
    "structured_outputs": [{"structured_outputs": {"choice": ["yes"]}}],
    "response_format": [{"response_format": {"type": "json_object"}, "max_tokens": 5}],
}
AS_GREEDY: list[dict[str, Any]] = [{**HOT, "top_k": 1}, {**HOT, "top_p": 1e-9}, {**HOT, "min_p": 1.0}]


@pytest.fixture(scope="module")
def letters() -> Iterator[Served]:
    """Writes the alphabet over and over, in small letters if it may choose; the capitals are nearly as likely."""
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def ending() -> Iterator[Served]:
    """Writes three letters and an end of sequence, over and over."""
    with serving(ScriptedModel(lambda id, place: {EOS: 10.0} if place % 4 == 3 else alphabet(id, place))) as served:
        yield served


def body_for(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    prompt = (
        {"messages": [{"role": "user", "content": "ab"}]} if path.endswith("chat/completions") else {"prompt": "ab"}
    )
    return {"temperature": 0, "max_tokens": 60, **prompt, **fields}


def text(served: Served, path: str, fields: Mapping[str, Any]) -> str:
    answer = served.ok(path, body_for(path, fields))
    if "outputs" in answer:
        return str(answer["outputs"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_parameter_changes_the_text(letters: Served, path: str, name: str) -> None:
    for fields in CHANGES[name]:
        without = {key: value for key, value in fields.items() if key != name}
        assert text(letters, path, fields) != text(
            letters, path, {**without, **({"seed": 1} if name == "seed" else {})}
        )
        assert text(letters, path, fields) == text(letters, path, fields)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", AS_GREEDY, ids=str)
def test_what_leaves_one_candidate_is_greedy(letters: Served, path: str, fields: dict[str, Any]) -> None:
    assert text(letters, path, fields) == text(letters, path, {}) != text(letters, path, HOT)


@pytest.mark.parametrize("path", PATHS)
def test_the_end_of_sequence_is_passed_over_and_shown_on_demand(ending: Served, path: str) -> None:
    ended, passed = text(ending, path, {}), text(ending, path, {"ignore_eos": True})
    assert len(ended) <= 3 < len(passed) and "<eos>" not in passed
    assert "<eos>" in text(ending, path, {"ignore_eos": True, "skip_special_tokens": False})


@pytest.mark.parametrize("path", PATHS)
def test_parameters_that_show_more(letters: Served, path: str) -> None:
    answer = letters.ok(path, body_for(path, {"n": 3, "return_token_ids": True, "max_tokens": 2}))
    outputs = answer.get("choices") or answer["outputs"]
    assert [output["index"] for output in outputs] == [0, 1, 2]
    assert all(len(output["token_ids"]) == 2 for output in outputs)


@pytest.mark.parametrize("path", PATHS)
def test_salts_keep_users_apart(letters: Served, path: str) -> None:
    def cached(salt: str | None) -> int:
        long = {"messages": [{"role": "user", "content": f"{path} " * 5}], "prompt": f"{path} " * 5}
        fields = {name: value for name, value in long.items() if name in PATHS[path].model_fields}
        usage = letters.ok(path, body_for(path, {**fields, "max_tokens": 1, "cache_salt": salt}))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(salt) for salt in ("one", "two", None)] == [0, 0, 0]
    assert min(cached(salt) for salt in ("one", "two", None)) > 0


def test_streamed_usage_shows_cached_tokens_in_chats_too(letters: Served) -> None:
    for _ in range(2):
        streamed = letters.stream_chat("n" * 40, max_tokens=1, stream_options={"include_usage": True})
    assert streamed.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


@pytest.mark.parametrize("path", PATHS)
def test_null_in_every_field_is_as_good_as_nothing(letters: Served, path: str) -> None:
    """Many clients send null for all that is not set."""
    required = {name for name, field in PATHS[path].model_fields.items() if field.is_required()}
    nulls: dict[str, Any] = dict.fromkeys({*PATHS[path].model_fields, "suffix", "user"} - required)
    limits = {"temperature": 0, "max_tokens": 8}
    assert text(letters, path, {**nulls, **limits}) == text(letters, path, limits)
    for name in nulls:
        assert letters.post(path, body_for(path, {"max_tokens": 1, name: None})).status_code == 200, name


ODD_TEXTS = (
    "a\x00b",
    "\ufeffhello",
    "Z\u0351\u036b\u0343" * 10,
    "مرحبا \u202e abc",
    "\r\n\r\n",
    "  two",
    "\u200b",
    "a" * 200,
)


@pytest.mark.parametrize("prompt", ODD_TEXTS, ids=ascii)
def test_odd_texts_come_back_as_they_were(letters: Served, prompt: str) -> None:
    assert text(letters, "/v1/completions", {"prompt": prompt, "echo": True, "max_tokens": 1})[:-1] == prompt
    tokens = letters.ok("/tokenize", {"prompt": prompt})["tokens"]
    assert letters.ok("/detokenize", {"tokens": tokens}) == {"prompt": prompt}


def test_texts_longer_than_the_context_are_tokenized(letters: Served) -> None:
    assert letters.ok("/tokenize", {"prompt": "ab" * 400})["count"] == 800


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"prompt": 5}, {"prompt": ["a"]}, {"messages": []}, {"model": "x", "prompt": "x", "tokens": [5]}),
        *({"tokens": value} for value in (None, "abc", ["a"], [1.5], [-1], [10**9])),
    ],
    ids=str,
)
def test_broken_requests_to_the_tokenizer(letters: Served, path: str, fields: dict[str, Any]) -> None:
    response = letters.post(path, fields)
    assert response.status_code == (404 if "model" in fields else 400) and response.json()["error"]["message"]

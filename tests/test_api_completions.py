"""/v1/completions and /generate: what comes back, streamed or not, for what is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_helpers import Served, Streamed, serving, strict_json
from engine_doubles import EOS, ScriptedModel, says, tiny_transformer

from mini_vllm.api.responses import Completion, Generated
from mini_vllm.api.streaming import encode_event


@pytest.fixture(scope="module")
def letters() -> Iterator[Served]:
    """Writes the letter of each position: "ab" goes on with "cdef..."."""
    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def random_model() -> Iterator[Served]:
    with serving(tiny_transformer()) as served:
        yield served


@pytest.mark.parametrize("character", ["\u0085", "\u2028", "\u2029", "\x0b", "\x1c", "\r", "\n"])
def test_an_event_is_one_line_however_lines_are_counted(character: str) -> None:
    event = encode_event({"text": f"a{character}b 🫠"})
    (line,) = event.decode().splitlines()[:-1]
    assert strict_json(line.removeprefix("data: ")) == {"text": f"a{character}b 🫠"}


def test_a_completion_has_the_text_the_reason_and_the_counts(letters: Served) -> None:
    answer = letters.complete("ab", max_tokens=4)
    Completion.model_validate(answer)
    assert answer["choices"] == [
        {"index": 0, "text": "cdef", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["object"] == "text_completion" and answer["model"] == "double" and answer["id"].startswith("cmpl-")


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_sixteen_tokens_unless_asked_otherwise(letters: Served, fields: dict[str, Any]) -> None:
    assert letters.complete("ab", **fields)["usage"]["completion_tokens"] == 16


def test_a_stop_string_ends_the_text_and_is_named(letters: Served) -> None:
    (choice,) = letters.complete("ab", max_tokens=20, stop=["zz", "ef"])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("cd", "stop", "ef")


@pytest.mark.parametrize("prompt", [["ab", "abc"], [[97, 98], [97, 98, 99]]], ids=["texts", "ids"])
def test_prompts_times_n_give_choices_in_order(letters: Served, prompt: Any) -> None:
    answer = letters.complete(prompt, n=2, echo=True, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["abcd", "abcd", "abcde", "abcde"]
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 8


def test_one_bad_prompt_refuses_the_list_and_names_it(letters: Served) -> None:
    response = letters.post("/v1/completions", {"prompt": [[97], [9999]]})
    assert response.status_code == 400
    assert "prompt 2 of 2" in response.json()["error"]["message"] and "9999" in response.json()["error"]["message"]
    letters.wait_until_quiet()


def test_logprobs_are_aligned_and_counted_from_the_start_of_the_prompt(letters: Served) -> None:
    (choice,) = letters.complete("ab", max_tokens=3, logprobs=1)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["c", "d", "e"] and logprobs["text_offset"] == [2, 3, 4]
    assert logprobs["top_logprobs"] == [
        {token: value} for token, value in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    ]
    assert logprobs["token_logprobs"][0] == pytest.approx(-0.126928, abs=1e-5)  # 10 beside 8: log(1 / (1 + e^-2))


def test_logprobs_zero_has_values_and_no_alternatives(letters: Served) -> None:
    (choice,) = letters.complete("ab", max_tokens=1, logprobs=0)["choices"]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["c"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(letters: Served, max_tokens: int) -> None:
    (choice,) = letters.complete("abd", max_tokens=max_tokens, echo=True, logprobs=1)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "abd" + "d" * max_tokens
    assert logprobs["text_offset"] == [0, 1, 2, 3][: 3 + max_tokens]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    best = logprobs["top_logprobs"][2]
    assert logprobs["token_logprobs"][2] < -20 and max(best, key=best.get) == "c"  # not the "d" that stands there
    assert choice["finish_reason"] == "length"


def test_no_infinity_is_written(letters: Served) -> None:
    """allowed_token_ids excludes what the model likes; raw logprobs are taken first, so all are finite anyway."""
    (choice,) = letters.complete("ab", max_tokens=2, logprobs=5, allowed_token_ids=[120])["choices"]
    assert choice["text"] == "xx" and all(value < 0 for value in choice["logprobs"]["token_logprobs"])


def test_a_character_of_several_tokens(letters: Served) -> None:
    """Tokens of a part of a character add '' until the last one; alternatives that are parts are named by bytes."""
    text = "é龜"
    with serving(ScriptedModel(says([*text.encode()], 2))) as served:
        (choice,) = served.complete("ab", max_tokens=9, logprobs=1)["choices"]
    assert choice["text"] == text
    assert choice["logprobs"]["tokens"] == ["", "é", "", "", "龜", ""]
    assert choice["logprobs"]["text_offset"] == [2, 2, 3, 3, 3, 4]


def test_return_token_ids(letters: Served) -> None:
    (choice,) = letters.complete("ab", max_tokens=2, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == [97, 98] and choice["token_ids"] == [99, 100]


def test_prompt_logprobs_hold_the_real_token(letters: Served) -> None:
    (choice,) = letters.complete("aq", max_tokens=1, prompt_logprobs=1)["choices"]
    first, second = choice["prompt_logprobs"]
    assert first is None and set(second) == {str(ord("q")), str(ord("b"))}
    assert second[str(ord("b"))]["rank"] == 1 and second[str(ord("q"))]["decoded_token"] == "q"


def test_cached_tokens_are_reported(letters: Served) -> None:
    prompt = "n" * 40
    letters.complete(prompt, max_tokens=1)
    details = letters.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 32}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "ab", "max_tokens": 20, "logprobs": 2, "return_token_ids": True},
        {"prompt": "ab", "max_tokens": 20, "echo": True, "logprobs": 2},
        {"prompt": ["ab", "Q", "longer"], "n": 2, "max_tokens": 12, "temperature": 1.5, "seed": 3, "logprobs": 0},
        {"prompt": [[200, 201], [5]], "max_tokens": 7, "echo": True},
        {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": "xyz", "max_tokens": 30, "temperature": 2.0, "seed": 1, "stop": ["a", "b", "e"]},
    ],
)  # fmt: skip
def test_a_stream_joins_to_the_whole(random_model: Served, fields: dict[str, Any]) -> None:
    whole = random_model.complete(**fields)
    streamed = random_model.stream("/v1/completions", {**fields, "stream_options": {"include_usage": True}})
    assert streamed.num_done == 1
    for choice in whole["choices"]:
        index = choice["index"]
        assert streamed.text(index) == choice["text"]
        assert streamed.finish_reasons(index) == [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            assert joined(streamed, index, "tokens") == choice["logprobs"]["tokens"]
            assert joined(streamed, index, "text_offset") == choice["logprobs"]["text_offset"]
            assert joined(streamed, index, "token_logprobs") == pytest.approx(choice["logprobs"]["token_logprobs"])
            assert len(joined(streamed, index, "top_logprobs")) == len(choice["logprobs"]["top_logprobs"])
        if "token_ids" in choice:
            assert [id for one in streamed.choices(index) for id in one["token_ids"]] == choice["token_ids"]
    last = streamed.chunks[-1]
    usage = {key: value for key, value in whole["usage"].items() if key != "prompt_tokens_details"}
    assert last["choices"] == [] and usage.items() <= last["usage"].items()


def joined(streamed: Streamed, index: int, name: str) -> list[Any]:
    """One list of the streamed logprobs."""
    return [item for one in streamed.choices(index) if one["logprobs"] for item in one["logprobs"][name]]


def test_events_are_valid_and_keep_their_head(letters: Served) -> None:
    streamed = letters.stream_complete("ab", max_tokens=5, stream_options={"include_usage": True})
    for chunk in streamed.chunks:
        Completion.model_validate(chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in streamed.chunks}) == 1
    assert {chunk["usage"] for chunk in streamed.chunks[:-1]} == {None}
    reasons = [one["finish_reason"] for one in streamed.choices()]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert streamed.headers["content-type"].startswith("text/event-stream") and "content-length" not in streamed.headers
    assert streamed.headers["x-accel-buffering"] == "no"


def test_usage_is_shown_only_when_asked_for(letters: Served) -> None:
    assert all("usage" not in chunk for chunk in letters.stream_complete("ab", max_tokens=3).chunks)
    always = letters.stream_complete("ab", max_tokens=3, stream_options={"continuous_usage_stats": True}).chunks
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert counts == sorted(counts) and counts[-1] == 3


def test_nothing_of_a_possible_stop_string_is_sent() -> None:
    with serving(ScriptedModel(says([*b"DEFGHIJ"], 3))) as served:
        streamed = served.stream_complete("ABC", stop="DEFGHIJ", max_tokens=10)
    assert streamed.text() == "" and streamed.finish_reasons() == ["stop"]


def test_an_end_of_sequence_has_no_text_and_counts() -> None:
    with serving(ScriptedModel(says([*b"ok"], 1))) as served:
        answer = served.complete("A", return_token_ids=True)
        assert answer["choices"][0]["text"] == "ok" and answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["token_ids"][-1] == EOS and answer["usage"]["completion_tokens"] == 3


def test_generate_is_the_plain_request(letters: Served) -> None:
    answer = letters.ok("/generate", {"prompt": "ab", "max_tokens": 3, "temperature": 0.01})
    Generated.model_validate(answer)
    assert answer["text"] == ["cde"] and answer["usage"]["completion_tokens"] == 3
    streamed = letters.stream("/generate", {"prompt": "ab", "max_tokens": 3})
    assert "".join(event["text"] for event in streamed.chunks) == "cde" and streamed.num_done == 1

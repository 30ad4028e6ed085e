"""Stop, length and text: exact token sequences are forced through the real engine by a scripted model."""

from __future__ import annotations

from typing import Any

import pytest
from engine_doubles import BOS, EOS, TOOL, ScriptedModel, assert_quiet, make_engine, run_to_end, says
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_vllm.engine.stop_strings import StopStringMatcher
from mini_vllm.outputs import FinishReason, RequestOutput

PROMPT = "Say it"


def ids(text: str) -> list[int]:
    return list(text.encode())


def answer(script: str | list[int], **params: Any) -> tuple[str, RequestOutput]:
    """Force an answer through the engine. Returns the streamed text and the final output, after a quiet check."""
    token_ids = ids(script) if isinstance(script, str) else script
    engine = make_engine(ScriptedModel(says(token_ids, len(PROMPT))))
    request_id = engine.add_request(PROMPT, **{"max_tokens": 100, "temperature": 0, **params})
    outputs = run_to_end(engine)[request_id]
    assert_quiet(engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [t for o in outputs for t in o.token_ids] == outputs[-1].outputs[0].token_ids
    return "".join(output.text for output in outputs), outputs[-1]


def result(script: str | list[int], **params: Any) -> tuple[str, str, int | str | None]:
    """Text, finish reason and stop reason; the streamed text is the final text."""
    streamed, final = answer(script, **params)
    choice = final.outputs[0]
    assert streamed == choice.text
    assert choice.finish_reason is not None
    return choice.text, choice.finish_reason.value, choice.stop_reason


# ---- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ď 🫠🥹龜 世界", "    .", "a , b", " n't", " world", "\n\n", "é"])
def test_streamed_text_is_the_final_text_and_no_half_character_is_sent(text: str) -> None:
    engine = make_engine(ScriptedModel(says(ids(text), len(PROMPT))))
    request_id = engine.add_request(PROMPT, max_tokens=100, temperature=0)
    outputs = run_to_end(engine)[request_id]
    assert all("\ufffd" not in output.text for output in outputs)
    assert "".join(output.text for output in outputs) == outputs[-1].outputs[0].text == text


def test_a_generation_cut_inside_a_character_ends_with_what_decode_gives() -> None:
    assert result("ab🥹", max_tokens=4) == ("ab\ufffd", "length", None)


def test_special_tokens_show_only_if_asked_for() -> None:
    script = [*ids("a"), TOOL, *ids("b")]
    assert result(script)[0] == "ab"
    assert result(script, skip_special_tokens=False)[0] == "a<tool>b"


# ---- stop strings -------------------------------------------------------------------------------------------------


def test_nothing_that_may_begin_a_stop_string_is_sent_before_it_is_known() -> None:
    streamed, final = answer("DEFGHIJ", stop=["DEFGHIJ"])
    assert streamed == "" and final.outputs[0].finish_reason is FinishReason.STOP


def test_held_back_text_is_sent_when_it_turns_out_to_be_no_stop_string() -> None:
    assert result("DEFGHIx", stop=["DEFGHIJ"]) == ("DEFGHIx", "stop", None)
    assert result("DEF", stop=["DEFGHIJ"], max_tokens=3) == ("DEF", "length", None)


def test_only_the_longest_possible_beginning_is_held_back() -> None:
    engine = make_engine(ScriptedModel(says(ids("aabaaab"), len(PROMPT))))
    request_id = engine.add_request(PROMPT, max_tokens=100, temperature=0, stop="aaab")
    outputs = run_to_end(engine)[request_id]
    assert [output.text for output in outputs] == ["", "", "aab", "", "", "", ""]
    assert outputs[-1].outputs[0].stop_reason == "aaab"


def test_a_stop_string_ends_the_text_before_it() -> None:
    assert result("one two beta gamma delta", stop=["beta gamma"]) == ("one two ", "stop", "beta gamma")
    assert result("one two beta", stop=["ta"], include_stop_str_in_output=True) == ("one two beta", "stop", "ta")


def test_the_stop_that_completes_first_wins() -> None:
    assert result("abcdef", stop=["bcde", "cd"]) == ("ab", "stop", "cd")
    assert result("abcdef", stop=["cd", "bcd"]) == ("a", "stop", "bcd")


def test_a_stop_string_of_split_characters() -> None:
    assert result("ab🫠🥹龜cd", stop=["🥹龜"]) == ("ab🫠", "stop", "🥹龜")


def test_stop_strings_do_not_look_at_the_prompt() -> None:
    assert result("it is so", stop=["Say it"]) == ("it is so", "stop", None)


def test_token_ids_and_logprobs_include_the_stop_string_and_the_end() -> None:
    _, final = answer("ab.cd", stop=["."], logprobs=0)
    assert final.outputs[0].token_ids == ids("ab.")
    assert final.outputs[0].logprobs is not None and len(final.outputs[0].logprobs) == 3
    assert answer("ab")[1].outputs[0].token_ids == [*ids("ab"), EOS]


def test_a_stop_string_that_is_a_special_token_works_while_special_tokens_are_skipped() -> None:
    assert result([*ids("ab"), TOOL, *ids("c")], stop=["<tool>"]) == ("ab", "stop", "<tool>")


# ---- ends by token ------------------------------------------------------------------------------------------------


def test_end_of_sequence_has_no_text_and_no_stop_reason() -> None:
    assert result("ab") == ("ab", "stop", None)


def test_a_stop_id_ends_the_answer_and_its_text_is_not_part_of_it() -> None:
    assert result("abc", stop_token_ids=[ord("c")]) == ("ab", "stop", ord("c"))
    assert result("abc", stop_token_ids=[ord("c")], include_stop_str_in_output=True) == ("abc", "stop", ord("c"))


def test_ignore_eos_goes_on_to_the_limit_and_stop_strings_still_stop() -> None:
    text, reason, _ = result("ab", ignore_eos=True, max_tokens=20)
    assert (text, reason) == ("ab", "length")
    assert len(answer("ab", ignore_eos=True, max_tokens=20)[1].outputs[0].token_ids) == 20
    assert result("ab.cd", ignore_eos=True, stop=["."]) == ("ab", "stop", ".")


def test_max_tokens_1_gives_exactly_one_token() -> None:
    assert answer("abc", max_tokens=1)[1].outputs[0].token_ids == ids("a")


def test_the_context_is_filled_to_the_last_place_and_not_over_it() -> None:
    engine = make_engine(ScriptedModel(says(ids("a" * 300), 250)), parts={"max_model_len": 256})
    request_id = engine.add_request([1] * 250, max_tokens=6, temperature=0)
    final = run_to_end(engine)[request_id][-1]
    assert len(final.outputs[0].token_ids) == 6 and final.outputs[0].finish_reason is FinishReason.LENGTH


# ---- min_tokens ---------------------------------------------------------------------------------------------------


def test_no_stop_of_any_kind_before_min_tokens_and_the_text_of_an_early_stop_string_stays() -> None:
    assert result("a.b.c.d", stop=["."], min_tokens=4) == ("a.b.c", "stop", ".")


def test_a_stop_string_that_begins_before_min_tokens_and_completes_after_it_stops() -> None:
    assert result("abcdefgh", stop=["cdef"], min_tokens=4) == ("ab", "stop", "cdef")
    assert result("aaaaaaaa", stop=["aa"], min_tokens=2) == ("a", "stop", "aa")  # the first "aa" was too early
    assert result("abcdefgh", stop=["b", "bcde"], min_tokens=3) == ("a", "stop", "bcde")
    assert result("abcdefgh", stop=["ab", "abz"], min_tokens=2, max_tokens=3) == ("abc", "length", None)
    assert result("abcd", stop=["cd"], min_tokens=4, max_tokens=4) == ("abcd", "length", None)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
    cuts=st.data(),
)
def test_the_first_stop_string_that_completes_after_min_tokens_wins(
    text: str, stops: list[str], min_tokens: int, cuts: st.DataObject
) -> None:
    """Against the plainest way: at the end of each token that is late enough, is there a stop string right there?"""
    ends = sorted({*cuts.draw(st.sets(st.integers(1, len(text)))), len(text)})
    expected, matched = text, None
    early = ([0, *ends])[min(min_tokens, len(ends))]  # where the text of the early tokens ends
    for end in range(early + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            matched = max(found, key=len)
            expected = text[: end - len(matched)]
            break
    matcher, shown, start = StopStringMatcher(stops, include_stop=False), "", 0
    for number, end in enumerate(ends, start=1):
        shown += matcher.push(text[start:end], may_stop=number > min_tokens)
        start = end
        if matcher.matched is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, matched)


def test_end_of_sequence_cannot_be_sampled_before_min_tokens() -> None:
    _, final = answer("ab", min_tokens=8, max_tokens=12)
    token_ids = final.outputs[0].token_ids
    assert EOS not in token_ids[:8] and token_ids[8] == EOS and len(token_ids) == 9


def test_stop_ids_cannot_be_sampled_before_min_tokens() -> None:
    _, final = answer("abcabcabc", stop_token_ids=[ord("c")], min_tokens=4)
    token_ids = final.outputs[0].token_ids
    assert ord("c") not in token_ids[:4] and token_ids[-1] == ord("c") and len(token_ids) == 6


# ---- logprobs -----------------------------------------------------------------------------------------------------


def test_token_texts_join_to_the_text_and_line_up_with_ids_and_logprobs() -> None:
    _, final = answer("a🥹 b", logprobs=2)
    choice = final.outputs[0]
    assert choice.token_texts == ["a", "", "", "", "🥹", " ", "b", ""]
    assert choice.logprobs is not None and choice.token_texts is not None
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    assert all(len(entry.top_token_ids) == 2 for entry in choice.logprobs)
    assert "".join(choice.token_texts) == choice.text


def test_streamed_logprobs_are_the_final_logprobs() -> None:
    engine = make_engine(ScriptedModel(says(ids("abc"), len(PROMPT))))
    request_id = engine.add_request(PROMPT, max_tokens=9, temperature=1.5, seed=3, logprobs=1)
    outputs = run_to_end(engine)[request_id]
    streamed = [entry for o in outputs for entry in o.outputs[0].delta_logprobs or []]
    assert streamed == outputs[-1].outputs[0].logprobs


@pytest.mark.parametrize("prompt", [[BOS], [5], [5, 6, 7, 8]])
def test_prompt_logprobs_have_one_entry_a_prompt_token_and_none_for_the_first(prompt: list[int]) -> None:
    engine = make_engine(ScriptedModel(lambda token, position: {(token + 1) % 256: 5.0}))
    request_id = engine.add_request(prompt, max_tokens=1, temperature=0, prompt_logprobs=1)
    entries = run_to_end(engine)[request_id][-1].prompt_logprobs
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    assert [entry.token_id for entry in entries[1:] if entry] == prompt[1:]
    assert all(entry.top_token_ids == (token,) for entry, token in zip(entries[1:], prompt[1:], strict=True) if entry)


def test_max_tokens_0_with_prompt_logprobs_scores_the_prompt_and_generates_nothing() -> None:
    engine = make_engine(ScriptedModel(lambda token, position: {(token + 1) % 256: 5.0}))
    request_id = engine.add_request([5, 6, 9], max_tokens=0, prompt_logprobs=0)
    final = run_to_end(engine)[request_id][-1]
    assert final.outputs[0].token_ids == [] and final.outputs[0].finish_reason is FinishReason.LENGTH
    assert final.prompt_logprobs is not None and len(final.prompt_logprobs) == 3
    assert_quiet(engine)


def test_prompt_logprobs_are_the_same_when_the_prompt_is_cached_chunked_or_preempted() -> None:
    script = lambda token, position: {(token + 1) % 256: 5.0, (token * position) % 256: 4.0}  # noqa: E731
    prompt = [*range(20, 60), 3, 4, 9]
    expected = None
    for options in ({}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}):
        engine = make_engine(ScriptedModel(script), block_size=4, **options)
        run_to_end_of_plain_request = engine.add_request(prompt, max_tokens=2, temperature=0)
        assert run_to_end(engine)[run_to_end_of_plain_request][-1].finished
        for _ in range(2):
            request_id = engine.add_request(prompt, max_tokens=2, temperature=0, prompt_logprobs=2)
            entries = run_to_end(engine)[request_id][-1].prompt_logprobs
            expected = expected or entries
            assert entries == expected

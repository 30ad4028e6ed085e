"""An answer's text is made when it is read: whenever that is, and by whichever thread, it is the same."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
from engine_doubles import EOS, TOOL, ScriptedModel, make_engine, says
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_vllm.engine.output_stream import merge_outputs
from mini_vllm.engine.sequence_text import SequenceText
from mini_vllm.outputs import CompletionOutput, RequestOutput

PROMPT = "Say it"

# Whole characters, characters that are cut off, bytes that are no text, special tokens, the end.
TOKENS = st.one_of(
    st.sampled_from([list(text.encode()) for text in ("a", "b", "é", "龜", "🫠")]),
    st.lists(st.integers(0, 255), min_size=1, max_size=2),
    st.sampled_from([[TOOL], [EOS]]),
)
SCRIPTS = st.lists(TOKENS, max_size=8).map(lambda parts: [token for part in parts for token in part])


@st.composite
def sampling_fields(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.integers(1, 20))
    return {
        "temperature": 0,
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, max_tokens)),
        "stop": draw(st.lists(st.sampled_from(["a", "ab", "ba", "é", "龜a", "\ufffd"]), max_size=2)) or None,
        "stop_token_ids": draw(st.sampled_from([None, [ord("b")]])),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0])),
        "n": draw(st.integers(1, 2)),
    }


def outputs_of(script: list[int], fields: dict[str, Any], abort_after: int, read: Any = None) -> list[RequestOutput]:
    """All outputs of a request that is aborted after some steps, if it is not finished by then.

    Args:
        read: called with each output while it is the newest one.
    """
    engine = make_engine(ScriptedModel(says(script, len(PROMPT))))
    request_id = engine.add_request(PROMPT, **fields)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        if len(outputs) == abort_after:
            engine.abort_request(request_id)
        for output in engine.step():
            outputs.append(output)
            if read is not None:
                read(output)
    return outputs


def deltas(choice: CompletionOutput) -> tuple[Any, ...]:
    times = choice.answer.token_times(choice.start, choice.end)
    return choice.delta_text, choice.delta_token_ids, choice.delta_logprobs, choice.delta_token_texts, len(times)


def totals(choice: CompletionOutput) -> tuple[Any, ...]:
    return choice.text, choice.token_ids, choice.logprobs, choice.token_texts, len(choice.token_times)


def all_of(output: RequestOutput) -> list[tuple[Any, ...]]:
    choices = output.outputs
    return [(c.index, c.finish_reason, c.stop_reason, *deltas(c), *totals(c)) for c in choices]


@settings(max_examples=150, deadline=None)
@given(script=SCRIPTS, fields=sampling_fields(), abort_after=st.integers(1, 25), data=st.data())
def test_a_text_is_the_same_whenever_it_is_read(
    script: list[int], fields: dict[str, Any], abort_after: int, data: st.DataObject
) -> None:
    at_once: list[list[tuple[Any, ...]]] = []
    outputs_of(script, fields, abort_after, lambda output: at_once.append(all_of(output)))
    late = outputs_of(script, fields, abort_after)
    order = data.draw(st.permutations(range(len(late))))
    read = {place: all_of(late[place]) for place in order}
    assert [read[place] for place in range(len(late))] == at_once


@settings(max_examples=100, deadline=None)
@given(script=SCRIPTS, fields=sampling_fields(), abort_after=st.integers(1, 25), data=st.data())
def test_merged_outputs_have_the_deltas_of_both(
    script: list[int], fields: dict[str, Any], abort_after: int, data: st.DataObject
) -> None:
    outputs = outputs_of(script, fields, abort_after)
    cut = data.draw(st.integers(0, len(outputs) - 1))
    merged = outputs[cut]
    for output in outputs[cut + 1 :]:
        merged = merge_outputs(merged, output)
    assert [totals(choice) for choice in merged.outputs] == [totals(choice) for choice in outputs[-1].outputs]
    for choice in merged.outputs:
        parts = [c for output in outputs[cut:] for c in output.outputs if c.index == choice.index]
        assert choice.delta_text == "".join(part.delta_text for part in parts)
        assert choice.delta_token_ids == [token for part in parts for token in part.delta_token_ids]


def test_what_an_abort_finds_held_back_belongs_to_the_last_token() -> None:
    fields = {"temperature": 0, "max_tokens": 9, "logprobs": 0}
    outputs = outputs_of(list("a龜".encode())[:3], fields, abort_after=3)
    last = outputs[-1].outputs[0]
    assert (last.text, last.token_texts) == ("a\ufffd", ["a", "", "\ufffd"])
    # That token is handed out, and the abort brought none whose text it could be.
    assert (last.delta_text, last.delta_token_ids, last.delta_token_texts) == ("\ufffd", [], [])
    merged = merge_outputs(outputs[-2], outputs[-1]).outputs[0]
    assert (merged.delta_text, merged.delta_token_texts) == ("\ufffd", ["\ufffd"])


def test_nothing_is_decoded_before_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    piece_of_token = SequenceText._piece_of_token
    monkeypatch.setattr(
        SequenceText, "_piece_of_token", lambda text, place: made.append(place) or piece_of_token(text, place)
    )
    outputs = outputs_of([ord("a")] * 5, {"temperature": 0, "max_tokens": 5}, 99)
    assert made == []
    assert outputs[1].text == "a"
    assert made == [0, 1]
    assert outputs[-1].outputs[0].text == "aaaaa"
    assert made == [0, 1, 2, 3, 4], "each token once"


def test_many_threads_read_one_answer_while_it_grows() -> None:
    script = list("a龜🫠é".encode()) * 10
    expected = bytes(script).decode()
    engine = make_engine(ScriptedModel(says(script, len(PROMPT))))
    engine.add_request(PROMPT, temperature=0, max_tokens=len(script))
    outputs: list[RequestOutput] = []
    texts: list[str] = []

    def read() -> None:
        seen, shown = 0, ""
        while not (seen and outputs[seen - 1].finished):
            if seen < len(outputs):
                shown, seen = shown + outputs[seen].text, seen + 1
        texts.append(shown)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 4


def test_an_output_can_be_sent_to_another_process_before_and_after_it_is_read() -> None:
    fields = {"temperature": 0, "max_tokens": 4, "logprobs": 0}
    for output in outputs_of(list("a龜".encode()), fields, 99):
        received = pickle.loads(pickle.dumps(output))
        assert all_of(received) == all_of(output)
        assert all_of(pickle.loads(pickle.dumps(output))) == all_of(output)


def test_an_output_shows_its_text() -> None:
    (first, *_) = outputs_of([ord("a")] * 3, {"temperature": 0, "max_tokens": 3}, 99)
    assert "delta_text='a', delta_token_ids=[97], finish_reason=None" in repr(first)

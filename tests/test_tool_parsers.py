"""Tool and reasoning parsers: the same calls however the text is cut; what is no call stays text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_vllm.api.message_reader import MessageReader
from mini_vllm.api.reasoning_parsers import reasoning_parser_named, reasoning_parser_of
from mini_vllm.api.tool_parsers import ParsedCall, parser_named, parser_of
from mini_vllm.outputs import FinishReason
from mini_vllm.tokenizer.chat_template import ChatTemplate

NAMES = ["find", "get_time"]
PARSERS = ["hermes", "llama3_json", "mistral", "pythonic"]


def merged(parts: list[str | ParsedCall]) -> list[str | ParsedCall]:
    """Texts that follow each other as one."""
    result: list[str | ParsedCall] = []
    for part in parts:
        if isinstance(part, str) and result and isinstance(result[-1], str):
            result[-1] += part
        else:
            result.append(part)
    return result


def read(parser: str, *pieces: str) -> list[str | ParsedCall]:
    reader = parser_named(parser)(NAMES)
    return merged([part for piece in pieces for part in reader.push(piece)] + reader.finish())


def call(name: str, **arguments: Any) -> ParsedCall:
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


NASTY = {"q": 'say "hi" }{[ </tool_call> {test1,test2 é🫠\n\\', "k": {"a": [1, {"b": []}], "c": None}}
OBJECT = json.dumps({"name": "find", "arguments": NASTY})
WRITTEN = {
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "llama3_json": OBJECT.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{OBJECT}]",
    "pythonic": f"[find(q={NASTY['q']!r}, k={NASTY['k']!r})]",
}


@pytest.mark.parametrize("parser", PARSERS)
def test_a_call_with_everything_in_its_strings(parser: str) -> None:
    assert read(parser, WRITTEN[parser]) == [call("find", **NASTY)]


@pytest.mark.parametrize(
    ("parser", "text", "parts"),
    [
        ("hermes", '<tool_call>{"name":"get_time","arguments":{}}</tool_call>', [call("get_time")]),
        ("hermes", '<tool_call>{"name":"get_time"}</tool_call>', [call("get_time")]),
        ("hermes", 'a <tool_call>{"name":"get_time"}</tool_call> b', ["a ", call("get_time"), " b"]),
        ("hermes", '<tool_call>\n{"name":"get_time"}', [call("get_time")]),
        ("hermes", '<tool_call>[{"name":"get_time"},{"name":"find"}]</tool_call>', [call("get_time"), call("find")]),
        ("hermes", '<tool_call>{"name":"find","arguments":"{\\"q\\":1}"}</tool_call>', [call("find", q=1)]),
        ("hermes", '<tool_call>{"name":"find","arguments":{"q":"\\ud800"}}</tool_call>', [call("find", q="\ufffd")]),
        ("llama3_json", '{"name":"get_time","parameters":{}}', [call("get_time")]),
        ("llama3_json", ' <|python_tag|>{"name":"find","parameters":{"q":1}}; {"name":"get_time","arguments":{}}',
         [call("find", q=1), call("get_time")]),
        ("mistral", 'Hm. [TOOL_CALLS] [{"name":"get_time","arguments":{}},{"name":"find","arguments":{"q":1}}]',
         ["Hm. ", call("get_time"), call("find", q=1)]),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"q":"}"}[TOOL_CALLS]get_time{}', [call("find", q="}"), call("get_time")]),
        ("mistral", '[TOOL_CALLS]find[CALL_ID]abc123xyz[ARGS]{"q":1}', [call("find", q=1)]),
        ("pythonic", "[get_time(), find(q='it\\'s', k=[-1.5, True, None, true, null])]",
         [call("get_time"), call("find", q="it's", k=[-1.5, True, None, True, None])]),
        ("pythonic", '[{"name": "find", "arguments": {"q": 1}}]', [call("find", q=1)]),
    ],
    ids=range(14),
)  # fmt: skip
def test_calls(parser: str, text: str, parts: list[str | ParsedCall]) -> None:
    assert read(parser, text) == parts


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>\nnot json\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"q": \n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"q": "never closed </tool_call> more'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"q": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"q": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 50_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "find", "arguments": {"q": ' + "[" * 950 + "]" * 950 + "}}</tool_call>"),
        ("hermes", "less < than <tool and <tool_call"),
        ("hermes", ""),
        ("llama3_json", '{"a": 1}'),
        ("llama3_json", '{"name": "find"}'),
        ("llama3_json", 'Sure: {"name": "find", "parameters": {}}'),
        ("llama3_json", '{"name": "find", "parameters": {'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] what? [1]"),
        ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {}}, 5]'),
        ("mistral", "[TOOL_CALLS]find[ARGS]{broken"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[find(1)]"),
        ("pythonic", "[find(**{'q': 1})]"),
        ("pythonic", "[find(q=open('x'))]"),
        ("pythonic", "[find(q={1: 2})]"),
        ("pythonic", "[find(q=1e999)]"),
        ("pythonic", "[find(q=b'x')]"),
        ("pythonic", "[unknown()]"),
        ("pythonic", "[find(q=" + "(" * 5000 + ")" * 5000 + ")]"),
        ("pythonic", "[find(q="),
        ("pythonic", "Sure: [find()]"),
        ("pythonic", "[]"),
    ],
    ids=range(33),
)
def test_what_is_no_call_stays_text(parser: str, text: str) -> None:
    assert read(parser, text) == [text] * bool(text)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "find", "[find(", ")]", "q="),
    *('{"name": "find", ', '"arguments": {"q": 1}}', '"parameters": {}}'),
    *('"', "'", "\\", "{", "}", "[", "]", ", ", "; ", "get_time"),
    *(" ", "\n", "text", "é", "<", "<think>", "</think>", *WRITTEN.values()),
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize("parser", PARSERS)
@settings(deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 10_000), max_size=20))
def test_what_comes_out_does_not_depend_on_how_the_text_is_cut(parser: str, text: str, places: list[int]) -> None:
    whole = read(parser, text)
    assert read(parser, *cut(text, places)) == whole
    assert read(parser, *text) == whole
    if not any(isinstance(part, ParsedCall) for part in whole):
        assert "".join(map(str, whole)) == text


@settings(deadline=None)
@given(
    text=TEXTS,
    places=st.lists(st.integers(0, 10_000), max_size=20),
    parser=st.sampled_from([None, *PARSERS]),
    thinking=st.sampled_from([None, "qwen3", "deepseek_r1"]),
    prompt_end=st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]),
    is_forced=st.booleans(),
)
def test_a_streamed_message_is_the_whole_one(
    text: str, places: list[int], parser: str | None, thinking: str | None, prompt_end: str, is_forced: bool
) -> None:
    def message(*pieces: str) -> tuple[str, str, list[Any]]:
        reader = MessageReader(
            None if thinking is None else reasoning_parser_named(thinking)(prompt_end),
            None if parser is None else parser_named(parser)(NAMES),
            is_forced=is_forced,
        )
        ends = [None] * (len(pieces) - 1) + [FinishReason.LENGTH]
        parts = [reader.push(piece, end) for piece, end in zip(pieces, ends, strict=True)]
        calls = [one["function"] for part in parts for one in part.calls]
        return "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls

    whole = message(text)
    assert message(*cut(text, places)) == whole
    assert message(*text, "") == whole


def message_of(text: str, *, tools: str | None = None, **options: Any) -> tuple[str, list[Any]]:
    reader = MessageReader(None, parser_named(tools)(NAMES) if tools else None, **options)
    part = reader.push(text, FinishReason.LENGTH)
    return part.content, [(one["function"]["name"], one["function"]["arguments"]) for one in part.calls]


def test_white_space_around_calls_is_left_out_and_other_white_space_is_not() -> None:
    one = '<tool_call>{"name": "get_time"}</tool_call>'
    assert message_of(f"\n{one}\n{one}\n", tools="hermes") == ("", [("get_time", "{}")] * 2)
    assert message_of(f" Look.  {one}\n", tools="hermes")[0] == " Look."
    assert message_of(f"{one} Done. \n", tools="hermes")[0] == " Done. \n"
    assert message_of(" \n", tools="hermes") == (" \n", [])


@pytest.mark.parametrize(
    ("parser", "cut_text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"q": "bl', [("find", '{"q": "bl')]),
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"q": 1}}\n</tool', [("find", '{"q": 1}')]),
        ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {}}, {"name": "get_time", "arguments": {', [
            ("find", "{}"), ("get_time", "{")]),
        ("pythonic", '[{"name": "find", "arguments": {"q": "a\\"name\\": ', [("find", '{"q": "a\\"name\\": ')]),
        ("llama3_json", '{"name": "find", "parameters": ', [("find", "")]),
    ],
)  # fmt: skip
def test_a_forced_call_that_was_cut_comes_as_far_as_it_went(parser: str, cut_text: str, calls: Any) -> None:
    assert message_of(cut_text, tools=parser, is_forced=True) == ("", calls)
    assert message_of(cut_text, tools=parser) == (cut_text, []) or parser == "hermes"


def test_a_forced_call_cut_before_its_name_has_the_name_if_there_is_but_one() -> None:
    assert message_of('<tool_call>\n{"na', tools="hermes", is_forced=True, forced_name="find") == ("", [("find", "")])
    assert message_of('<tool_call>\n{"na', tools="hermes", is_forced=True) == ('<tool_call>\n{"na', [])


@pytest.mark.parametrize(
    ("parser", "prompt_end", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nWell.\n</think>\n\nIt is noon.", "Well.", "It is noon."),
        ("qwen3", "", "It is noon. </think>", "", "It is noon. </think>"),
        ("qwen3", "assistant\n<think>\n", "Well.\n</think>\n\nNoon.", "Well.", "Noon."),
        ("qwen3", "<think>\n\n</think>\n\n", "Noon. <think> x", "", "Noon. <think> x"),
        ("qwen3", "", "<think>\n\n</think>\n\nNoon.", "", "Noon."),
        ("qwen3", "", "<think>never ends </thin", "never ends </thin", ""),
        ("deepseek_r1", "", "Well.</think>Noon.", "Well.", "Noon."),
        ("deepseek_r1", "", "<think>Well.</think>Noon.", "Well.", "Noon."),
        ("deepseek_r1", "<think>\n", "Well", "Well", ""),
        ("deepseek_r1", "", "", "", ""),
    ],
)
def test_reasoning(parser: str, prompt_end: str, text: str, reasoning: str, content: str) -> None:
    split = reasoning_parser_named(parser)(prompt_end).push(text, is_last=True)
    assert (split.reasoning, split.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", "hermes"),
        ("{{ tools }} <tool_call> {{ messages }}", "hermes"),
        ("{{ tools }} <tool_call><function=x> {{ messages }}", None),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ('{{ tools }} {"name": function name, "parameters": dictionary} <|eot_id|>', "llama3_json"),
        ('{{ tools }} "parameters": [func_name1(params_name1=params_value1)] <|eot_id|>', "pythonic"),
        ("{{ tools }} in a way of its own", None),
    ],
)
def test_the_parser_is_chosen_from_the_template_where_it_is_clear(template: str, name: str | None) -> None:
    chosen = parser_of(ChatTemplate({"default": template}, {}))
    assert chosen is (None if name is None else parser_named(name))


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ messages }}", None),
        ("{% if enable_thinking %}<think>\n\n</think>{% endif %}", "qwen3"),
        ("content.split('</think>') <think>", "deepseek_r1"),
    ],
)
def test_the_reasoning_parser_too(template: str, name: str | None) -> None:
    chosen = reasoning_parser_of(ChatTemplate({"default": template}, {}))
    assert chosen is (None if name is None else reasoning_parser_named(name))

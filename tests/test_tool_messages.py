"""Tools in a conversation: arguments as each template wants them, text for templates that know no tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_chat_template import CHATML, OWN_LINES, SPECIAL, TOOLS, oracle

from mini_vllm.errors import InvalidRequestError
from mini_vllm.tokenizer.chat_template import ChatTemplate

# As Qwen2.5 and Hermes write calls, as DeepSeek-V3 does, and one that shows what it is given.
TOJSON = """{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{{ tools | tojson }} {{ 'tool' }}"""
CONCATENATED = """{%- for message in messages %}{%- for call in message.tool_calls or [] %}
{{- '```json\\n' + call['function']['arguments'] + '\\n```' }}{% endfor %}{% endfor %}{{ tools }}"""
SHOWN = """{%- for message in messages %}{%- for call in message.tool_calls or [] %}
{{- call.function.arguments }}{% endfor %}{% endfor %}{{ tools }}"""
ITEMS = """{%- for message in messages %}{%- for call in message.tool_calls or [] %}
{%- for key, value in call.function.arguments.items() %}<{{ key }}>{{ value }}</{{ key }}>{% endfor %}
{%- endfor %}{% endfor %}{{ tools }}"""


def conversation(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [
        {"role": "user", "content": "Find blue."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sky"},
    ]


def ours(template: str) -> ChatTemplate:
    return ChatTemplate({"default": template}, SPECIAL)


@pytest.mark.parametrize("arguments", ['{"q": "é"}', {"q": "é"}], ids=["text", "object"])
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (TOJSON, '"arguments": {"q": "é"}}'),
        (CONCATENATED, '```json\n{"q": "é"}\n```'),
        (SHOWN, '{"q": "é"}'),
        (ITEMS, "<q>é</q>"),
    ],
    ids=["tojson", "concatenated", "shown", "items"],
)
def test_arguments_come_as_the_template_wants_them(template: str, shown: str, arguments: Any) -> None:
    assert shown in ours(template).render(conversation(arguments))


def test_a_template_that_knows_tools_gives_what_it_gives_in_transformers() -> None:
    expected = oracle(TOJSON).apply_chat_template(conversation({"q": "é"}), tokenize=False, tools=TOOLS)
    # Over there a content that is null is shown as Python writes it; here it is empty.
    assert ours(TOJSON).render(conversation('{"q": "é"}'), tools=TOOLS) == expected.replace("None", "")


@pytest.mark.parametrize("nothing", [None, "", "{}", {}])
def test_no_arguments(nothing: Any) -> None:
    assert '"arguments": {}}' in ours(TOJSON).render(conversation(nothing))


@pytest.mark.parametrize(
    ("calls", "param"),
    [
        ("x", "messages[0].tool_calls"),
        ([5], "messages[0].tool_calls[0].function"),
        ([{"function": {}}], "messages[0].tool_calls[0].function"),
        ([{"function": {"name": "f", "arguments": "{"}}], "messages[0].tool_calls[0].function.arguments"),
        ([{"function": {"name": "f", "arguments": [1]}}], "messages[0].tool_calls[0].function.arguments"),
        ([{"function": {"name": "f", "arguments": "[" * 100_000}}], "messages[0].tool_calls[0].function.arguments"),
    ],
    ids=range(6),
)
def test_bad_calls_are_refused_by_their_place(calls: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        ours(TOJSON).render([{"role": "assistant", "tool_calls": calls}])
    assert refused.value.param == param


def test_an_empty_list_of_calls_is_none() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}]
    assert ours("{{ 'tool_calls' in messages[1] }}").render(messages) == "False"


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    text = ours(CHATML).render([{"role": "user", "content": "a"}], tools=TOOLS)
    assert text.startswith("<|im_start|>system\nYou may call") and text.count("system") == 1
    assert f"<tools>\n{json.dumps(TOOLS[0], ensure_ascii=False)}\n</tools>" in text
    with_own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    assert "<|im_start|>system\nBe brief.\n\nYou may call" in ours(CHATML).render(with_own, tools=TOOLS)


def test_a_template_without_calls_gets_them_and_their_results_as_text() -> None:
    text = ours(CHATML).render([*conversation('{"q": "é"}'), {"role": "tool", "content": "sea"}])
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call><|im_end|>' in text
    )
    results = "<tool_response>\nsky\n</tool_response>\n<tool_response>\nsea\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text


def test_a_template_that_knows_results_keeps_their_role() -> None:
    assert "nameless tool" in ours(OWN_LINES).render(conversation("{}"))


def test_without_tools_nothing_is_said_of_them() -> None:
    messages = [{"role": "user", "content": "a"}]
    assert ours(CHATML).render(messages, tools=[]) == ours(CHATML).render(messages)

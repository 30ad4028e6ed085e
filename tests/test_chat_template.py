"""Chat templates: the text that transformers renders, the sandbox, and errors that are the request's."""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from mini_vllm.errors import InvalidConfigError, InvalidRequestError
from mini_vllm.tokenizer.chat_template import ChatTemplate, load_chat_template

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{%- set system = messages[0]['content'] %}
{%- else %}{% set rest = messages %}{% set system = false %}{% endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if loop.index0 == 0 and system %}
        {%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {%- else %}{% set content = message['content'] %}{% endif %}
    {%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

MISTRAL = """{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- elif message.role == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{- tool.function | tojson }}{{- ", " if not loop.last else "]" }}{% endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] " + (message.tool_calls | tojson) + eos_token }}
    {%- elif message.role == "assistant" %}{{- " " + message.content | trim + eos_token }}
    {%- elif message.role == "tool" %}{{- "[TOOL_RESULTS] " + message.content | string + "[/TOOL_RESULTS]" }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if ns.index > 50 %}{% break %}{% endif %}
{%- endfor %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{#- a comment #}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% endif %}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {% generation %}
    {%- set inside = message['content'] | trim %}
    {{- inside + '<|eot_id|>' }}
    {% endgeneration %}
    {{- inside is defined }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

OWN_LINES = """
{% for message in messages %}
    {% if message.role != 'tool' %}
{{ message.role }}: {{ message.content }}
    {% else %}
{{ 'named' if 'name' in message else 'nameless' }} tool
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
assistant:
{% endif %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "llama-2": LLAMA2,
    "mistral": MISTRAL,
    "llama-3": LLAMA3,
    "lines": OWN_LINES,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'", "parameters": {"type": "object"}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "<ü>"}}}
CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hi {{ 7 * 7 }} <b> 龜"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b \n"},
        {"role": "user", "content": "c"},
    ],
    "tool": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "12:00", "tool_call_id": "c", "name": None},
    ],
}


def oracle(template: str) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with nothing but a chat template and special tokens."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **SPECIAL)


def ours(template: str) -> ChatTemplate:
    return ChatTemplate({"default": template}, SPECIAL)


def text_or_refusal(render: Callable[[], str], refusal: type[Exception]) -> str:
    try:
        return render()
    except refusal:
        return "refused"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_or_refuse_as_in_transformers(
    name: str, conversation: str, tools: Any, add_generation_prompt: bool
) -> None:
    if (tools and name not in ("mistral", "llama-3")) or (conversation == "tool" and name != "mistral"):
        return  # a template that knows no tools gets them as text, as no other library does: test_tool_messages.py
    template, messages = TEMPLATES[name], CONVERSATIONS[conversation]
    options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
    theirs = oracle(template)
    expected = text_or_refusal(
        lambda: theirs.apply_chat_template(messages, tokenize=False, **options), jinja2.TemplateError
    )
    assert text_or_refusal(lambda: ours(template).render(messages, **options), InvalidRequestError) == expected


def test_a_refusal_says_what_the_template_says() -> None:
    with pytest.raises(InvalidRequestError, match="Only user and assistant roles are supported!"):
        ours(MISTRAL).render(CONVERSATIONS["system"])


@pytest.mark.parametrize("name", ["chatml", "llama-2", "mistral", "llama-3"])
@pytest.mark.parametrize("last", ["The capital is", "ends with a space ", "  ", "a\nb"])
def test_the_final_message_is_continued_as_in_transformers(name: str, last: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": last}]
    arguments = {"continue_final_message": True, "add_generation_prompt": False}
    expected = oracle(TEMPLATES[name]).apply_chat_template(messages, tokenize=False, **arguments)
    assert ours(TEMPLATES[name]).render(messages, **arguments) == expected


def test_continuing_chatml_leaves_no_end_mark_and_keeps_the_space() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "assistant", "content": "Well, "}]
    text = ours(CHATML).render(messages, continue_final_message=True, add_generation_prompt=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\nWell, "


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequestError, match="changes or leaves out the final message") as caught:
        ours("{{ messages[0].role }}").render(
            CONVERSATIONS["one"], continue_final_message=True, add_generation_prompt=False
        )
    assert caught.value.param == "continue_final_message"


def test_continuing_and_beginning_an_answer_contradict_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="contradict"):
        ours(CHATML).render(CONVERSATIONS["one"], continue_final_message=True, add_generation_prompt=True)


def test_text_of_messages_is_not_run() -> None:
    text = "{{ 7 * 7 }} {% for x in [] %} {# c #}"
    assert text in ours(CHATML).render([{"role": "user", "content": text}])


def test_more_variables_reach_the_template() -> None:
    template = ours("{{ enable_thinking }}|{{ documents[0].title }}|{{ bos_token }}")
    rendered = template.render(
        CONVERSATIONS["one"], template_kwargs={"enable_thinking": False}, documents=[{"title": "T"}]
    )
    assert rendered == "False|T|<s>"


def test_strftime_now_is_today() -> None:
    before = datetime.datetime.now().strftime("%Y-%m-%d")
    text = ours("{{ strftime_now('%Y-%m-%d') }}").render(CONVERSATIONS["one"])
    assert text in {before, datetime.datetime.now().strftime("%Y-%m-%d")}


def test_the_tool_template_is_for_requests_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, SPECIAL)
    assert template.render(CONVERSATIONS["one"]) == "plain"
    assert template.render(CONVERSATIONS["one"], tools=TOOLS) == "tools"
    assert template.render(CONVERSATIONS["one"], tools=[]) == "plain"


# ---- errors are the request's ----------------------------------------------------------------------------------------


def test_no_template_is_an_error_with_a_hint() -> None:
    with pytest.raises(InvalidRequestError, match=r"no chat template.*--chat-template FILE") as caught:
        ChatTemplate({}, SPECIAL).render(CONVERSATIONS["one"])
    assert caught.value.param == "messages"


def test_named_templates_without_a_default_are_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"templates named rag only"):
        ChatTemplate({"rag": "x"}, SPECIAL).render(CONVERSATIONS["one"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system') }}", "no system"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(100000000) | length }}", "Range too big"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% if %}", "error in line 1"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_whatever_a_template_does_wrong_is_a_refused_request_with_its_text(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ours(template).render(CONVERSATIONS["one"])
    assert caught.value.param == "messages"


def test_a_role_that_the_template_names_is_known_and_others_are_listed() -> None:
    lines = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "ipython", "content": "b"}]
    with pytest.raises(InvalidRequestError, match=r"one of system, developer, user, .* names; got 'ipython'"):
        ours(lines).render(messages)
    naming = "{% if messages[1].role == 'ipython' %}!{% endif %}" + lines
    assert ours(naming).render(messages) == "!user: a\nipython: b\n"


def test_a_developer_is_the_system_to_a_template_that_does_not_know_the_word() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "a"}]
    system = [{"role": "system", "content": "Be brief."}, messages[1]]
    assert ours(CHATML).render(messages) == ours(CHATML).render(system)
    assert ours(CHATML).render(messages, tools=TOOLS) == ours(CHATML).render(system, tools=TOOLS)
    knowing = '{{ "known" if messages[0].role == "developer" else "unknown" }}'
    assert ours(knowing).render(messages) == "known"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        ({"role": "user"}, "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "asistant", "content": "x"}], "messages[0].role"),
        ([{"role": "User", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": ["user"], "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": [7]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [{"type": "hologram"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "a", "x": object()}], "messages[0].x"),
    ],
    ids=str,
)
def test_a_bad_message_is_refused_and_its_place_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ours(CHATML).render(messages)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_endless_nesting_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(InvalidRequestError, match="nested deeper than 100"):
        ours(CHATML).render([{"role": "user", "content": "a", "x": nested}])
    with pytest.raises(InvalidRequestError, match="nested deeper than 100"):
        ours(CHATML).render(CONVERSATIONS["one"], tools=nested)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "al"}, {"type": "text", "text": "pha"}]
    assert ours(CHATML).render([{"role": "user", "content": parts}]) == ours(CHATML).render(
        [{"role": "user", "content": "alpha"}]
    )


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["missing", "null"])
def test_an_assistant_may_have_nothing_but_tool_calls(content: dict[str, Any]) -> None:
    message = {"role": "assistant", **content, "tool_calls": [CALL]}
    assert "<|im_start|>assistant\n<tool_call>\n" in ours(CHATML).render([{"role": "user", "content": "a"}, message])


def test_the_callers_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    before = copy.deepcopy(messages)
    ours(CHATML).render(messages, continue_final_message=True, add_generation_prompt=False)
    assert messages == before


# ---- a template from the command line --------------------------------------------------------------------------------


class TokenizerWithTemplate:
    """As much of a tokenizer as `load_chat_template` looks at."""

    def __init__(self) -> None:
        self.chat_templates = {"default": "the model's"}
        self.special_tokens = SPECIAL


def test_a_file_takes_the_place_of_the_models_template(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("mine {{ eos_token }}", encoding="utf-8")
    tokenizer: Any = TokenizerWithTemplate()
    assert load_chat_template(tokenizer).render(CONVERSATIONS["one"]) == "the model's"
    assert load_chat_template(tokenizer, path).render(CONVERSATIONS["one"]) == "mine </s>"


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("a\n{% if %}", "error in line 2")])
def test_a_file_that_is_no_template_stops_the_start(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidConfigError, match=message) as caught:
        load_chat_template(TokenizerWithTemplate(), path)  # type: ignore[arg-type]
    assert caught.value.field == "chat_template"

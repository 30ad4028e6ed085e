"""Chat templates: from a list of messages to the text that a model was trained on.

Where it stands: before `Tokenizer.encode(..., add_special_tokens=False)`; the template writes BOS itself if the model
wants one. Templates are small Jinja programs that come with the model (or from whoever runs the server, never from a
client):

    [{"role": "user", "content": "Hi"}]  ->  "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"

What always holds:
- They run in Jinja's sandbox with what the transformers library gives them, and the text is the same as there.
- Text of messages is data: template code in it is not run.
- A template that fails, by `raise_exception` or by a fault, is a refused request with its text, not a failed server.
- No template is ever assumed.

In vLLM: `vllm/renderers/hf.py`, over `transformers.PreTrainedTokenizerBase.apply_chat_template`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mini_vllm.errors import InvalidConfigError, InvalidRequestError
from mini_vllm.tokenizer.chat_messages import normalize_messages, plain_json
from mini_vllm.tokenizer.tokenizer import Tokenizer
from mini_vllm.tokenizer.tool_messages import (
    wants_text,
    with_arguments,
    with_calls_as_text,
    with_results_as_text,
    with_tools_as_text,
)

# Put after the last message's text to find where that ends. The space shows whether the template trims the text.
_END_MARK = "\ue000END OF THE FINAL MESSAGE\ue001 "


def load_chat_template(tokenizer: Tokenizer, template_file: Path | None = None) -> ChatTemplate:
    """The chat template of a model, or of a file that takes its place.

    Raises:
        InvalidConfigError: the file cannot be read or is no Jinja template. (A model's own template that is broken only
            fails chat requests, as completions do not need it.)
    """
    if template_file is None:
        return ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    try:
        source = template_file.read_text(encoding="utf-8")
        _environment().parse(source)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(
            f"The chat template {template_file} cannot be read: {error}.", field="chat_template"
        ) from error
    except TemplateSyntaxError as error:
        raise InvalidConfigError(
            f"The chat template {template_file} has an error in line {error.lineno}: {error.message}.",
            field="chat_template",
        ) from error
    return ChatTemplate({"default": source}, tokenizer.special_tokens)


class ChatTemplate:
    """The chat templates of one model.

    Args:
        templates: Jinja sources by name. "default" is the usual one; "tool_use", if there, is for requests with tools.
        special_tokens: names and texts that the templates may use: {"bos_token": "<s>", ...}.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, Template] = {}
        self._wants_text: dict[str, bool] = {}  # by name: whether it wants the arguments of calls as text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: OpenAI's messages; see `normalize_messages` for what is accepted.
            add_generation_prompt: end with what begins an assistant's answer.
            continue_final_message: end inside the last message, without its end mark, so that the model goes on with
                it. Not together with add_generation_prompt.
            tools: functions in OpenAI's form; a template that knows no tools gets them as text of the system message.
            documents: documents, for templates that show them.
            template_kwargs: more variables of the template (`enable_thinking`, ...).

        Raises:
            InvalidRequestError: bad messages, no template, or the template's own refusal, with its text.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt contradict each other; set one of them to false.",
                param="continue_final_message",
            )
        conversation = self._conversation(messages, tools)
        template = self._template(with_tools=bool(tools))
        final_text = str(conversation[-1]["content"])
        if continue_final_message:
            conversation[-1]["content"] = final_text + _END_MARK
        variables = {
            **self._special_tokens,
            **plain_json(dict(template_kwargs or {}), "chat_template_kwargs"),
            "messages": conversation,
            "tools": plain_json(tools, "tools"),
            "documents": plain_json(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(template, variables)
        return _cut_at_end_mark(text, final_text) if continue_final_message else text

    def source(self, *, with_tools: bool) -> str | None:
        """The Jinja source for requests with or without tools; None if there is none."""
        return self._sources.get(self._name(with_tools=with_tools))

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template itself writes tools into the prompt; if not, `tool_messages.py` does."""
        source = self.source(with_tools=True)
        try:
            return source is not None and "tools" in meta.find_undeclared_variables(_environment().parse(source))
        except TemplateSyntaxError:  # a request will be refused with the reason
            return False

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """The messages, checked, with roles, tools and calls in the form that the template can show."""
        name = self._name(with_tools=bool(tools))
        source = self._sources.get(name, "")
        conversation = normalize_messages(messages, lambda role: _names(source, role))
        if not _names(source, "developer"):
            # OpenAI's later name of the same role. A template that does not know it would drop the message, or show
            # the model a word that it was not trained on.
            conversation = [{**one, "role": "system"} if one["role"] == "developer" else one for one in conversation]
        if any("tool_calls" in message for message in conversation):
            if "tool_calls" in source:
                conversation = with_arguments(conversation, as_text=self._takes_text(name, with_tools=bool(tools)))
            else:
                conversation = with_calls_as_text(conversation)
        if not _names(source, "tool"):
            conversation = with_results_as_text(conversation)
        if tools and not self.shows_tools:
            conversation = with_tools_as_text(conversation, plain_json(tools, "tools"))
        return conversation

    def _takes_text(self, name: str, *, with_tools: bool) -> bool:
        if name not in self._wants_text:
            template = self._template(with_tools=with_tools)
            variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
            self._wants_text[name] = wants_text(lambda messages: _run(template, {**variables, "messages": messages}))
        return self._wants_text[name]

    def _name(self, *, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self._sources else "default"

    def _template(self, *, with_tools: bool) -> Template:
        """The compiled template for a request."""
        name = self._name(with_tools=with_tools)
        if name not in self._sources:
            others = f" It has templates named {', '.join(sorted(self._sources))} only." if self._sources else ""
            raise InvalidRequestError(
                f"The model has no chat template, so it cannot take messages.{others} Start with --chat-template FILE "
                "to give it one, or send a plain prompt to /v1/completions.",
                param="messages",
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self._sources[name])
            except TemplateSyntaxError as error:
                raise InvalidRequestError(
                    f"The model's chat template has an error in line {error.lineno}: {error.message}. Start with "
                    "--chat-template FILE to use another one.",
                    param="messages",
                ) from error
        return self._compiled[name]


def _names(source: str, role: str) -> bool:
    """Whether a template has this role in quotation marks: it does something about it, or asks whether it is there."""
    return f"'{role}'" in source or f'"{role}"' in source


def _run(template: Template, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except TemplateError as error:  # raise_exception, an undefined variable, an access that the sandbox forbids
        raise InvalidRequestError(f"The chat template refused the messages: {error}", param="messages") from error
    except Exception as error:  # a template is a program: any fault in it, such as a TypeError, ends this request only
        raise InvalidRequestError(
            f"The chat template failed on these messages ({type(error).__name__}: {error}).", param="messages"
        ) from error


def _cut_at_end_mark(text: str, final_text: str) -> str:
    """The text up to the end of the last message's content; if the template trimmed that, white space goes as well."""
    mark = _END_MARK.rstrip()
    end = text.rfind(mark)
    if end < 0 or final_text.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message cannot be used here: the chat template changes or leaves out the final message.",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks an assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        """The content in a scope of its own: a variable set inside is not seen outside."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.datetime.now().strftime(date_format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the transformers library writes it: Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

"""`POST /v1/chat/completions`: the next message of a conversation.

Where it stands: `answering.py` does the work, the model's chat template makes the prompt; here is what makes an answer
a message. `tools.py` says what tools want of the prompt and of the answer, `message_reader.py` finds calls and
reasoning in the answer's text.

In vLLM: `vllm/entrypoints/openai/chat_completion/serving.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mini_vllm.api.answering import answer_request, check_body, lifecycle_of
from mini_vllm.api.generation import Generation, Piece
from mini_vllm.api.json_body import JsonRoute
from mini_vllm.api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from mini_vllm.api.message_reader import MessagePart, MessageReader
from mini_vllm.api.protocol import ChatBody
from mini_vllm.api.reasoning_parsers import ReasoningParser, reasoning_parser_named, reasoning_parser_of
from mini_vllm.api.responses import ChatCompletion
from mini_vllm.api.server_config import ReasoningParserName, ToolParserName
from mini_vllm.api.streaming import AnswerWriter
from mini_vllm.api.tool_parsers import ToolParser, parser_named, parser_of
from mini_vllm.api.tools import ToolPlan
from mini_vllm.errors import InvalidRequestError
from mini_vllm.outputs import FinishReason
from mini_vllm.tokenizer.chat_template import ChatTemplate

router = APIRouter(route_class=JsonRoute)
PROMPT_END = 16  # tokens at the end of a prompt that a reasoning parser looks at


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "description": "The answers."}})
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    check_body(request, body)
    lifecycle = lifecycle_of(request)
    engine, config = lifecycle.engine().engine, lifecycle.config
    params, plan = body.sampling_params(), body.tool_plan()
    tools = _tool_parser(config.tool_call_parser, plan, engine.chat_template)
    if tools is not None:
        params = plan.sampling_params(params, tools, engine.tokenizer.special_token_id)
    reasoning = None
    # A form holds from the first token on, so a model that is given one does not think before.
    if params.structured_outputs is None and not body.continue_final_message:
        reasoning = _reasoning_parser(config.reasoning_parser, engine.chat_template)

    def make_reader(generation: Generation) -> MessageReader:
        names = [tool.name for tool in plan.tools]
        return MessageReader(
            None if reasoning is None else reasoning(_prompt_end(generation)),
            None if tools is None else tools(names),
            is_forced=plan.is_forced,
            forced_name=plan.only_name,
        )

    return await answer_request(
        request,
        body,
        params,
        [body.messages],
        lambda generation, _: ChatWriter(generation, body, make_reader),
        id_prefix="chatcmpl",
        template_options=body.template_options(),
    )


def _tool_parser(name: ToolParserName, plan: ToolPlan, template: ChatTemplate) -> type[ToolParser] | None:
    """The parser for a request; None if it may not call anything."""
    if plan.mode == "none":
        return None
    if name == "none":
        raise InvalidRequestError("tools are switched off here (--tool-call-parser none)", param="tools")
    parser = parser_of(template) if name == "auto" else parser_named(name)
    if parser is None and not plan.is_forced:
        raise InvalidRequestError(
            "the chat template does not tell in which form this model writes calls; start with --tool-call-parser "
            'NAME, or force calls, for which any form will do: tool_choice "required", or a named function',
            param="tools",
        )
    return parser or parser_named("hermes")


def _reasoning_parser(name: ReasoningParserName, template: ChatTemplate) -> type[ReasoningParser] | None:
    if name == "none":
        return None
    return reasoning_parser_of(template) if name == "auto" else reasoning_parser_named(name)


def _prompt_end(generation: Generation) -> str:
    return generation.tokenizer.decode(generation.requests[0].prompt_token_ids[-PROMPT_END:], skip_special_tokens=False)


class ChatWriter(AnswerWriter):
    """Shows a generation as messages.

    Args:
        generation: of one request.
        body: what was asked for.
        make_reader: makes the reader of each choice's text.
    """

    def __init__(
        self, generation: Generation, body: ChatBody, make_reader: Callable[[Generation], MessageReader]
    ) -> None:
        self._generation = generation
        self._body = body
        self._make_reader = make_reader
        self._readers: dict[int, MessageReader] = {}  # by the index of the choice
        params = generation.requests[0].params
        self._names = TokenNames(generation.tokenizer, skip_special_tokens=params.skip_special_tokens)
        options = body.stream_options
        self._shows_usage = bool(options and options.include_usage)
        self._shows_usage_always = bool(options and options.continuous_usage_stats)
        self._head = {"id": generation.answer_id, "created": generation.created, "model": generation.model}

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(piece) for piece in pieces],
            "usage": self._generation.usage.as_dict(),
            **self._prompt_fields(pieces[0]),
        }

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.is_first:
            role = {"index": piece.place, "delta": {"role": "assistant", "content": ""}}
            yield self._event([{**role, "logprobs": None, "finish_reason": None}], self._prompt_fields(piece))
        delta = self._delta(piece)
        if delta or piece.finish_reason is not None or (self._generation.shows_tokens and piece.token_ids):
            yield self._event([{"index": piece.place, "delta": delta, **self._end_of_choice(piece)}])

    def usage_event(self) -> dict[str, Any]:
        return {**self._event([]), "usage": self._generation.usage.as_dict()}

    def _event(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> dict[str, Any]:
        event = {**self._head, "object": "chat.completion.chunk", "choices": choices, **(more or {})}
        if self._shows_usage_always:
            event["usage"] = self._generation.usage.as_dict()
        elif self._shows_usage:
            event["usage"] = None
        return event

    def _choice(self, piece: Piece) -> dict[str, Any]:
        part = self._read(piece)
        message: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.calls:
            message.update(content=part.content or None, tool_calls=list(part.calls))
        return {"index": piece.place, "message": message, **self._end_of_choice(piece)}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        num_calls = self._reader(piece.place).num_calls
        part = self._read(piece)
        delta: dict[str, Any] = {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.content:
            delta["content"] = part.content
        if part.calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(part.calls, num_calls)]
        return delta

    def _read(self, piece: Piece) -> MessagePart:
        return self._reader(piece.place).push(piece.text, piece.finish_reason)

    def _reader(self, place: int) -> MessageReader:
        if place not in self._readers:
            self._readers[place] = self._make_reader(self._generation)
        return self._readers[place]

    def _finish_reason(self, piece: Piece) -> str | None:
        """A cut call is no call to be answered: then the engine's own reason stands."""
        reader = self._reader(piece.place)
        if piece.finish_reason is FinishReason.STOP and reader.num_calls > 0 and not reader.has_cut_call:
            return "tool_calls"
        return None if piece.finish_reason is None else str(piece.finish_reason)

    def _end_of_choice(self, piece: Piece) -> dict[str, Any]:
        """What stands behind the text, in messages and in events alike. The text has been read before."""
        logprobs = None
        if piece.logprobs is not None and piece.token_texts is not None:
            logprobs = chat_logprobs(self._names, piece.logprobs, piece.token_texts)
        end: dict[str, Any] = {
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(piece),
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            end["token_ids"] = piece.token_ids
        return end

    def _prompt_fields(self, piece: Piece) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = piece.request.prompt_token_ids
        if piece.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._names, piece.prompt_logprobs)
        return fields

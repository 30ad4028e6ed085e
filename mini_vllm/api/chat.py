"""`POST /v1/chat/completions`: the next message of a conversation.

Where it stands: `answering.py` does the work, the model's chat template makes the prompt; here is what makes an answer
a message.

In vLLM: `vllm/entrypoints/openai/chat_completion/serving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mini_vllm.api.answering import answer_request, check_model
from mini_vllm.api.generation import Generation, Piece
from mini_vllm.api.json_body import JsonRoute
from mini_vllm.api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from mini_vllm.api.protocol import ChatBody
from mini_vllm.api.responses import ChatCompletion
from mini_vllm.api.streaming import AnswerWriter

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion, "description": "The answers."}})
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    check_model(request, body.model)
    body.check_other_fields()
    return await answer_request(
        request,
        body,
        body.sampling_params(),
        [body.messages],
        lambda generation, _: ChatWriter(generation, body),
        id_prefix="chatcmpl",
        template_options=body.template_options(),
    )


class ChatWriter(AnswerWriter):
    """Shows a generation as messages.

    Args:
        generation: of one request.
        body: what was asked for.
    """

    def __init__(self, generation: Generation, body: ChatBody) -> None:
        self._generation = generation
        self._body = body
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
            if not (piece.has_text_or_end or (self._generation.shows_tokens and piece.token_ids)):
                return
        delta = {"content": piece.text} if piece.text else {}
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
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": piece.place, "message": message, **self._end_of_choice(piece)}

    def _end_of_choice(self, piece: Piece) -> dict[str, Any]:
        """What stands behind the text, in messages and in events alike."""
        logprobs = None
        if piece.logprobs is not None and piece.token_texts is not None:
            logprobs = chat_logprobs(self._names, piece.logprobs, piece.token_texts)
        end: dict[str, Any] = {
            "logprobs": logprobs,
            "finish_reason": None if piece.finish_reason is None else str(piece.finish_reason),
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

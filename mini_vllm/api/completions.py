"""`POST /v1/completions`: text that goes on from a prompt.

    {"prompt": ["A", "B"], "n": 2}  ->  choices 0 and 1 go on from "A", 2 and 3 from "B"

Where it stands: `answering.py` does the work; here is what makes an answer a completion.

In vLLM: `vllm/entrypoints/openai/completion/serving.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mini_vllm.api.answering import PromptTexts, answer_request, check_body
from mini_vllm.api.generation import Generation, Piece
from mini_vllm.api.json_body import JsonRoute
from mini_vllm.api.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from mini_vllm.api.protocol import CompletionBody
from mini_vllm.api.responses import Completion
from mini_vllm.api.streaming import AnswerWriter

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses={200: {"model": Completion, "description": "The answers."}})
async def completions(body: CompletionBody, request: Request) -> Response:
    """Go on from a prompt, or from each of several."""
    check_body(request, body)
    params = body.sampling_params()
    return await answer_request(
        request,
        body,
        params,
        body.prompt,
        lambda generation, texts: CompletionWriter(generation, body, texts),
        id_prefix="cmpl",
        needs_prompt_texts=bool(body.echo) or body.logprobs is not None,
    )


class CompletionWriter(AnswerWriter):
    """Shows a generation as completions.

    Args:
        generation: to be shown.
        body: what was asked for.
        texts: of each request's prompt tokens, where echo or logprobs need them.
    """

    def __init__(self, generation: Generation, body: CompletionBody, texts: PromptTexts) -> None:
        self._generation = generation
        self._body = body
        self._texts = texts
        params = generation.requests[0].params
        self._names = TokenNames(generation.tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._offsets: dict[int, int] = {}  # choice -> where its next token begins, from the start of the prompt
        options = body.stream_options
        self._shows_usage = bool(options and options.include_usage)
        self._shows_usage_always = bool(options and options.continuous_usage_stats)
        self._head = {
            "id": generation.answer_id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
        }

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        choices = [self._choice(piece) for piece in pieces]
        return {**self._head, "choices": choices, "usage": self._generation.usage.as_dict()}

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        event = {**self._head, "choices": [self._choice(piece)]}
        if self._shows_usage_always:
            event["usage"] = self._generation.usage.as_dict()
        elif self._shows_usage:
            event["usage"] = None
        yield event

    def usage_event(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": self._generation.usage.as_dict()}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.place,
            "text": self._echo(piece) + piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": None if piece.finish_reason is None else str(piece.finish_reason),
            "stop_reason": piece.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.is_first:
                choice["prompt_token_ids"] = piece.request.prompt_token_ids
        if self._body.prompt_logprobs is not None and piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._names, piece.prompt_logprobs)
        return choice

    def _echo(self, piece: Piece) -> str:
        if not (self._body.echo and piece.is_first):
            return ""
        prompt = piece.request.prompt
        return "".join(self._texts[piece.request.request_id]) if prompt is None else prompt

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None or piece.token_texts is None:
            return None
        entries = [*piece.logprobs]
        texts = list(piece.token_texts)
        prompt = self._texts[piece.request.request_id]
        offset = self._offsets.get(piece.place, sum(map(len, prompt)))
        self._offsets[piece.place] = offset + sum(map(len, texts))
        if self._body.echo and piece.is_first:
            asked = piece.prompt_logprobs or []
            return completion_logprobs(self._names, [*asked, *entries], [*prompt, *texts], 0)
        return completion_logprobs(self._names, entries, texts, offset)

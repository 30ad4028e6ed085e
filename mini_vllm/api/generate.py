"""`POST /generate`: the plainest request there is, a prompt and how to go on.

    {"prompt": "Explain KV cache.", "max_tokens": 128, "temperature": 0.8}  ->  {"text": ["..."], ...}

Streamed, each event has the index of its answer and the text that is new.

In vLLM: `vllm/entrypoints/api_server.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mini_vllm.api.answering import answer_request, check_body
from mini_vllm.api.generation import Generation, Piece
from mini_vllm.api.json_body import JsonRoute
from mini_vllm.api.protocol import GenerateBody
from mini_vllm.api.responses import Generated
from mini_vllm.api.streaming import AnswerWriter

router = APIRouter(route_class=JsonRoute)


@router.post("/generate", responses={200: {"model": Generated, "description": "The texts."}})
async def generate(body: GenerateBody, request: Request) -> Response:
    """Go on from a prompt."""
    check_body(request, body)
    return await answer_request(
        request,
        body,
        body.sampling_params(),
        body.prompt,
        lambda generation, _: GenerateWriter(generation, body),
        id_prefix="gen",
    )


class GenerateWriter(AnswerWriter):
    """Shows a generation as bare texts.

    Args:
        generation: to be shown.
        body: what was asked for.
    """

    def __init__(self, generation: Generation, body: GenerateBody) -> None:
        self._generation = generation
        self._shows_token_ids = bool(body.return_token_ids)

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        return {
            "id": self._generation.answer_id,
            "model": self._generation.model,
            "text": [piece.text for piece in pieces],
            "outputs": [self._output(piece) for piece in pieces],
            "usage": self._generation.usage.as_dict(),
        }

    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        yield self._output(piece)

    def usage_event(self) -> dict[str, Any]:
        return {"usage": self._generation.usage.as_dict()}

    def _output(self, piece: Piece) -> dict[str, Any]:
        output: dict[str, Any] = {
            "index": piece.place,
            "text": piece.text,
            "finish_reason": None if piece.finish_reason is None else str(piece.finish_reason),
            "stop_reason": piece.stop_reason,
        }
        if self._shows_token_ids:
            output["token_ids"] = piece.token_ids
        return output

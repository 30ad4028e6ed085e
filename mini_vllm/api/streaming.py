"""Server-sent events: an answer while it is made.

    data: {"id": "cmpl-...", "choices": [{"index": 0, "text": " Paris", ...}]}

    : still working            a comment, when nothing has come for a while; clients skip it

    data: [DONE]

Where it stands: the last station of a stream. It takes pieces from a `Generation`, has an `AnswerWriter` make events of
them, and sends.

What always holds:
- While the client reads fast enough, a token is an event. While it does not, sending waits, and the engine's stream
  merges what comes meanwhile: memory is bounded and nobody else is slowed down.
- Every stream ends with [DONE]. If something fails after the start, an event `{"error": ...}` stands before it.
- When the client leaves, the engine ends the request.

In vLLM: the stream generators in `vllm/entrypoints/openai/*/serving.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from mini_vllm.api.access_log import log_of
from mini_vllm.api.disconnect import unless_gone
from mini_vllm.api.errors import as_api_error
from mini_vllm.api.generation import Generation, Piece
from mini_vllm.json_text import json_line

HEARTBEAT = b": still working\n\n"
DONE = b"data: [DONE]\n\n"
# Proxies must neither keep nor buffer nor compress.
_HEADERS = MappingProxyType({"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"})


class AnswerWriter(ABC):
    """Shows the pieces of a generation in the form of one endpoint."""

    @abstractmethod
    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""

    @abstractmethod
    def events(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events that show one piece."""

    @abstractmethod
    def usage_event(self) -> dict[str, Any]:
        """The event that has nothing but the token counts."""


class EventStream(Response):
    """The response that streams a generation.

    Args:
        generation: not begun yet.
        writer: of the endpoint.
        shows_usage: end with an event of token counts.
        on_close: called once when the stream is over, however it ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, writer: AnswerWriter, *, shows_usage: bool, on_close: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._generation = generation
        self._writer = writer
        self._shows_usage = shows_usage
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, send))
        finally:
            self._on_close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        async def send_bytes(data: bytes, *, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        failure: Exception | None = None
        try:
            async with aclosing(self._generation.pieces()) as arrivals:
                async for pieces in arrivals:
                    await send_bytes(self._encoded(pieces) if pieces else HEARTBEAT)
            failure = self._generation.failure
        except Exception as error:
            failure = error
        last = b""
        if failure is not None:
            log_of(scope).error = str(failure)
            last += encode_event(as_api_error(failure).body)
        elif self._shows_usage:
            last += encode_event(self._writer.usage_event())
        await send_bytes(last + DONE, is_last=True)

    def _encoded(self, pieces: list[Piece]) -> bytes:
        return b"".join(encode_event(event) for piece in pieces for event in self._writer.events(piece))


def encode_event(value: Mapping[str, Any]) -> bytes:
    """One event, which is one line."""
    return b"data: " + json_line(value, separators=(",", ":")).encode("utf-8") + b"\n\n"

"""What stands around every route: request id, access log, key, size of the body.

    client -> WholeRequest -> RequestRecord -> [CORS] -> ApiKeys -> BodyLimit -> routes

Plain ASGI, as a wrapper that buffers (Starlette's BaseHTTPMiddleware) would stand between a stream and its client's
leaving.

What always holds: every answer has an X-Request-Id and one line in the log; no route but /health is reached without a
key where keys are set, whatever its path is.

In vLLM: `vllm/entrypoints/openai/server_utils.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_vllm.api.access_log import CLIENT_GONE, RequestLog, attach_log
from mini_vllm.api.errors import ApiError, as_api_error
from mini_vllm.api.metrics import HttpMetrics

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})  # served without a key
LINGER = 10.0  # seconds that a client may go on sending what nobody wants, before its connection is closed
_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # what may go into a log and a header as it is


class WholeRequest:
    """Takes in what is left of a request before its answer ends, and throws it away.

    A refusal may be sent before the body is there. Were the connection then closed, as it is where the client asked for
    that, the client would still be sending: the connection is reset, and instead of a 413 or 401 it sees that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _sends_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        is_whole = False

        async def receive_and_note() -> Message:
            nonlocal is_whole
            message = await receive()
            is_whole = is_whole or not message.get("more_body", False)
            return message

        async def discard_rest() -> None:
            while not is_whole:
                await receive_and_note()

        async def send_at_the_end(message: Message) -> None:
            if not is_whole and message["type"] == "http.response.body" and not message.get("more_body", False):
                await send({**message, "more_body": True})
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(discard_rest(), LINGER)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, receive_and_note, send_at_the_end)


def _sends_body(headers: Headers) -> bool:
    """Whether a body is on its way. Who waits for a 100 before sending it sends none after an answer."""
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return has_body and "expect" not in headers


class RequestRecord:
    """Gives each request its id, and its line in the log when it is over."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        log = RequestLog(_request_id(Headers(scope=scope)), scope["method"], scope["path"])
        attach_log(scope, log)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                log.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = log.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if log.status != CLIENT_GONE:
                raise  # in the middle of an answer: the connection is closed, which is all that can be told
            log.error = f"{type(error).__name__}: {error}"
            await as_api_error(error).response()(scope, receive, send_with_id)
        finally:
            log.seconds = time.monotonic() - started
            route = scope.get("route")
            self._metrics.count(log.method, getattr(route, "path", "none"), log.status)
            log.write()


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _SAFE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class ApiKeys:
    """Lets nobody through without a key.

    Args:
        keys: any one will do.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_known(Headers(scope=scope)):
            error = ApiError(401, "no valid API key; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        found = False
        for key in self._keys:  # all of them, each in constant time: how long it takes tells nothing
            found |= hmac.compare_digest(key, given.encode("utf-8", "surrogateescape"))
        return found and scheme.lower() == "bearer"


class BodyLimit:
    """Refuses bodies that are too large, by their declared length or when they turn out to be.

    Args:
        limit: in bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limit:
            await ApiError(413, self._message).response()(scope, receive, send)
            return
        received = 0

        async def receive_some() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise HTTPException(413, self._message)
            return message

        await self._app(scope, receive_some, send)

    @property
    def _message(self) -> str:
        return f"the body is over {self._limit} bytes, the limit of this server (--max-body-size)"

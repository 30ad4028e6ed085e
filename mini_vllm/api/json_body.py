"""Reading a JSON body: stricter than Python's reader, and kinder to broken text.

Where it stands: between the socket and Pydantic. `JsonRoute` is the class of every route, so that each handler's model
is filled from what `parse_json` gives.

What always holds: NaN and Infinity, which are not JSON, are refused by the field that they stand in; half a surrogate
pair, which is legal JSON but no text, becomes U+FFFD; a body that cannot be read is a 400 that says why. No list or
object in a body is longer than any request needs: otherwise Pydantic would make a million errors of a million wrong
entries, and everybody else would wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from types import MappingProxyType
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from mini_vllm import json_text
from mini_vllm.api.access_log import CLIENT_GONE
from mini_vllm.api.errors import BodyError

# Entries of a field: prompts may be long, and a mask may name the whole vocabulary; a body cannot hold many more.
_MOST = MappingProxyType(
    {"messages": 16_384, **dict.fromkeys(("prompt", "tokens", "allowed_token_ids", "stop_token_ids"), 2**23)}
)
MOST_ENTRIES = 4096  # of any other field, and fields of a body
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MAY_HOLD_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        HTTPException: with status 400.
    """
    try:
        value = json_text.parse_json(body, parse_constant=NotJson)
        return without_lone_surrogates(value) if _MAY_HOLD_SURROGATE.search(body) else value
    except (ValueError, RecursionError) as error:  # the latter where the surrogates are looked for
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise HTTPException(400, f"the body is not valid JSON: {reason}") from error


class NotJson:
    """Stands for NaN or Infinity in a body. It is of no type that a field has, so that the field's error names it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def without_lone_surrogates(value: Any) -> Any:
    """The same JSON value with U+FFFD for every half of a surrogate pair."""
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_lone_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_lone_surrogates(key): without_lone_surrogates(item) for key, item in value.items()}
    return value


def check_sizes(body: Any) -> None:
    """Refuse a body with too many fields, or a field with too many entries.

    Raises:
        BodyError: with the field in `param`.
    """
    if not isinstance(body, dict):
        return
    if len(body) > MOST_ENTRIES:
        raise BodyError(f"the body has {len(body)} fields; at most {MOST_ENTRIES} are allowed")
    for name, value in body.items():
        most = _MOST.get(name, MOST_ENTRIES)
        if isinstance(value, (list, dict)) and len(value) > most:
            raise BodyError(f"{name[:80]} holds {len(value)} entries; at most {most} are allowed", param=name[:80])


class _JsonRequest(Request):
    async def body(self) -> bytes:
        try:
            return await super().body()
        except ClientDisconnect as error:  # FastAPI would call it a broken body, which in the counts it is not
            raise HTTPException(CLIENT_GONE, "the client left before it had sent its request") from error

    async def json(self) -> Any:
        value = parse_json(await self.body())
        check_sizes(value)
        return value


class JsonRoute(APIRoute):
    """A route whose body is read by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle

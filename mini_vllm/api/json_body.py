"""Reading a JSON body: stricter than Python's reader, and kinder to broken text.

Where it stands: between the socket and Pydantic. `JsonRoute` is the class of every route, so that each handler's model
is filled from what `parse_json` gives.

What always holds: NaN and Infinity, which are not JSON, are refused by the field that they stand in; half a surrogate
pair, which is legal JSON but no text, becomes U+FFFD; a body that cannot be read is a 400 that says why.

A large body keeps nobody waiting. Reading JSON cannot be interrupted, not even by other threads, and takes as long as
there are values: so these are counted in the text, and too many are refused before one of them is made. No list or
object is longer than any request needs: otherwise Pydantic would make a million errors of a million wrong entries.
Between the steps of reading a large body everybody else has a turn.

In vLLM: nothing; FastAPI's own reader.
"""

from __future__ import annotations

import asyncio
import json
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
MOST_VALUES = 2**19  # of a body, all lists and objects together
LARGE = 64 * 1024  # bytes of a body from which on others have a turn while it is read
_TEXT = re.compile('"[^"]*"')
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MAY_HOLD_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        HTTPException: with status 400.
    """
    try:
        value = json_text.parse_json(body, parse_constant=NanOrInfinity)
        return without_lone_surrogates(value) if _MAY_HOLD_SURROGATE.search(body) else value
    except (ValueError, RecursionError) as error:  # the latter where the surrogates are looked for
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise HTTPException(400, f"the body is not valid JSON: {reason}") from error


def check_number_of_values(body: bytes) -> None:
    """Refuse a JSON text with more values than any request needs, before it is read.

    Raises:
        BodyError: it has more.
        HTTPException: with status 400: it is in no encoding of JSON.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") < MOST_VALUES:
        return
    try:
        text = body.decode(json.detect_encoding(body))
    except ValueError as error:
        raise HTTPException(400, f"the body is not valid JSON: {error}") from error
    text = text.replace("\\\\", "").replace('\\"', "")  # what is left of quotes begins or ends a string
    count = text.count('"') // 2
    if count <= MOST_VALUES:
        text = _TEXT.sub("", text)
        count = 1 + text.count(",") + text.count("[") + text.count("{")
    if count > MOST_VALUES:
        raise BodyError(f"the body holds more than {MOST_VALUES} values; send it in several requests")


class NanOrInfinity:
    """Stands for NaN or Infinity in a body. It is of no type that a field has, so that the field's error names it.

    Some of these errors show the name of this class.
    """

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


class JsonRequest(Request):
    async def body(self) -> bytes:
        try:
            return await super().body()
        except ClientDisconnect as error:  # FastAPI would call it a broken body, which in the counts it is not
            raise HTTPException(CLIENT_GONE, "the client left before it had sent its request") from error

    async def json(self) -> Any:
        body = await self.body()
        check_number_of_values(body)
        if len(body) < LARGE:
            return _checked(body)
        await asyncio.sleep(0)
        value = _checked(body)
        await asyncio.sleep(0)
        return value


def _checked(body: bytes) -> Any:
    value = parse_json(body)
    check_sizes(value)
    return value


class JsonRoute(APIRoute):
    """A route whose body is read by `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle

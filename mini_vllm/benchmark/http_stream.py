"""HTTP for the load generator: one request a connection, and the answer as it comes in.

Where it stands: below `serving.py`. `h11` knows the protocol, `asyncio` the sockets; between them is nothing that costs
time, since the load generator and the server often share a machine.

    stream_events   POST; the data of each server-sent event, without its end mark
    get_json        GET; one JSON value

In vLLM: `vllm/benchmarks/lib/endpoint_request_func.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from mini_vllm.errors import InvalidConfigError
from mini_vllm.json_text import parse_json

_READ_SIZE = 65_536
_LONGEST_ERROR = 300  # characters of an error body that are shown
_DEFAULT_PORTS = {"http": 80, "https": 443}


def _is_sendable(text: str) -> bool:
    """Whether it can stand in the head of a request."""
    return text.isascii() and text.isprintable()


class HttpFailure(Exception):
    """A request that came to no answer: refused, broken off, or an error status."""


@dataclass(frozen=True)
class Server:
    """Where to send requests.

    Args:
        host, port, is_secure: of the connection.
        prefix: what goes before every path, such as "" or "/api".
        headers: sent with every request.
    """

    host: str
    port: int
    is_secure: bool
    prefix: str
    headers: Mapping[str, str]

    @staticmethod
    def at(url: str, api_key: str | None = None) -> Server:
        """From a URL with or without `/v1` at its end.

        Raises:
            InvalidConfigError: it is no URL of a server, or it or the key cannot be sent.
        """
        if not _is_sendable(url) or " " in url:
            raise InvalidConfigError(
                f"a URL is sent as ASCII without spaces, got {url!r}; write what is else in its path as %C3%A9, in a "
                "host name as xn--...",
                field="url",
            )
        if api_key is not None and not _is_sendable(api_key):
            raise InvalidConfigError(
                "api_key is sent in a header, as ASCII that can be printed, and holds something else; see that it was "
                "copied whole and alone",
                field="api_key",
            )
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidConfigError(f"{url!r} is not a URL: {error}", field="url") from error
        if parts.scheme not in _DEFAULT_PORTS or not host:
            raise InvalidConfigError(f"a server's URL is written http://host:port, got {url!r}", field="url")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Server(host, port or _DEFAULT_PORTS[parts.scheme], parts.scheme == "https", prefix, headers)


async def stream_events(server: Server, path: str, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
    """POST a body and yield the data of each event, up to `[DONE]`.

    Raises:
        HttpFailure: no connection, an error status (with its text), or a stream that ends without `[DONE]`.
    """
    rest = b""
    async with aclosing(_exchange(server, "POST", path, json.dumps(body).encode())) as chunks:
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip().decode()
                    if data == "[DONE]":
                        return
                    yield data
    raise HttpFailure("the stream ended without [DONE]")


async def get_json(server: Server, path: str) -> Any:
    """GET a JSON value.

    Raises:
        HttpFailure: no connection, an error status, or something else than JSON.
    """
    async with aclosing(_exchange(server, "GET", path, b"")) as chunks:
        text = b"".join([chunk async for chunk in chunks])
    try:
        return parse_json(text)
    except ValueError as error:
        raise HttpFailure(f"{path} did not answer with JSON: {error}") from error


async def _exchange(server: Server, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
    """Send one request; yield the body of a good answer, piece by piece."""
    try:
        reader, writer = await asyncio.open_connection(server.host, server.port, ssl=server.is_secure or None)
    except OSError as error:
        raise HttpFailure(
            f"no connection to {server.host}:{server.port} ({error}); start the server (mini-vllm serve), or correct "
            "the URL"
        ) from error
    try:
        connection = h11.Connection(h11.CLIENT)
        headers = {
            "Host": f"{server.host}:{server.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **server.headers,
        }
        request = h11.Request(method=method, target=server.prefix + path, headers=list(headers.items()))
        for part in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(part) or b"")
        status, error_text = 0, b""
        async for event in _answer(connection, reader):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif status == 200:
                yield bytes(event.data)
            else:
                error_text += event.data
        if status != 200:
            raise HttpFailure(_refusal(status, error_text))
    except (OSError, h11.ProtocolError) as error:
        raise HttpFailure(f"the connection broke: {error}") from error
    finally:
        writer.close()


def _refusal(status: int, body: bytes) -> str:
    """What an error status says: the message, if the body has OpenAI's form, and what may help."""
    try:
        text = str(parse_json(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    # What a server answers that has not loaded its model yet, or that is ending.
    remedy = "; wait until /health answers 200, and try again" if status == 503 else ""
    return f"status {status}: {text[:_LONGEST_ERROR]}{remedy}"


async def _answer(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[h11.Response | h11.Data]:
    """The head and the pieces of an answer, to its end."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_SIZE))
        elif isinstance(event, (h11.Response, h11.Data)):
            yield event
        elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
            return

"""Errors over HTTP: from exceptions to the body that OpenAI's clients understand.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}

    InvalidRequestError, a body of the wrong shape      400
    no or a wrong key                                   401
    unknown model or path                               404
    body too large                                      413
    too many requests                                   429, with Retry-After
    loading, shutting down, engine dead                 503, with Retry-After where it helps
    request timeout                                     504
    a computation that failed                           500, never for what a client sent

Where it stands: `server.py` installs the handlers; everything in `api/` and the engine just raises.

In vLLM: `vllm/entrypoints/openai/engine/serving.py` (`create_error_response`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mini_vllm.api.access_log import log_of
from mini_vllm.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger(__name__)

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
MAX_SHOWN = 80  # characters of a wrong value that an error repeats
MAX_ITEMS_SHOWN = 16


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: what happened, with the numbers, and what to do.
        param: the field at fault.
        code: a word for programs, such as `model_not_found`.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


class BodyError(HTTPException):
    """A body that is refused before its fields are looked into, where FastAPI lets only an HTTPException through.

    Args:
        message: as of `ApiError`.
        param: the field at fault.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(400, message)
        self.param = param


def as_api_error(error: Exception) -> ApiError:
    """The answer to an exception. What nobody expected is a 500, whose text stays in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, RequestValidationError):
        return _validation_error(error.errors())
    if isinstance(error, BodyError):
        return ApiError(400, str(error.detail), param=error.param)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "an internal error; the server's log has the details")


def install_error_handlers(app: FastAPI) -> None:
    """Have every exception of a handler answered in OpenAI's form; what nobody expects, `RequestRecord` answers."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        api_error = as_api_error(error)
        log_of(request.scope).error = str(api_error)
        response = api_error.response()
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    for kind in (ApiError, InvalidRequestError, EngineDeadError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _validation_error(errors: Sequence[Any]) -> ApiError:
    """The first thing that is wrong with a body; all that is wrong with the same field, if it takes several types."""
    first = errors[0]
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid" or not place:
        return ApiError(400, "the body must be a JSON object, sent with the content type application/json")
    field = str(place[0])
    wanted = list(dict.fromkeys(_message(error) for error in errors if field in error["loc"][:2]))
    got = "" if first["type"] == "missing" else f"; got {shown(first.get('input'))}"
    return ApiError(400, f"{field}: {' or '.join(wanted[:3])}{got}", param=field)


def _message(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    try:
        text = repr(_beginning(value, depth=3))
    except (ValueError, RecursionError):  # an integer of thousands of digits, deep nesting
        text = f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _beginning(value: Any, depth: int) -> Any:
    """As much of a value as could be shown: a body may hold millions of entries."""
    if isinstance(value, (str, bytes)):
        return value[:MAX_SHOWN]
    if not isinstance(value, (list, dict)):
        return value
    if not depth:
        return "..."
    if isinstance(value, list):
        return [_beginning(item, depth - 1) for item in value[:MAX_ITEMS_SHOWN]]
    return {
        _beginning(key, depth - 1): _beginning(item, depth - 1) for key, item in islice(value.items(), MAX_ITEMS_SHOWN)
    }

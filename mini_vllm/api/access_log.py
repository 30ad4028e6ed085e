"""The access log: one line a request, with its tokens and times, and none of its text.

    POST /v1/completions 200 in 1.214 s  id=6f1c...  12 + 64 tokens, first after 0.051 s, length
    {"time": ..., "method": "POST", "path": "/v1/completions", "status": 200, "seconds": 1.214, ...}

Where it stands: the middleware makes a `RequestLog`, handlers fill in what they know, the middleware writes it.

In vLLM: uvicorn's access log and `vllm/entrypoints/logger.py`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from mini_vllm.api.server_config import LogFormat
from mini_vllm.json_text import json_line

access_logger = logging.getLogger("mini_vllm.access")
CLIENT_GONE = 499  # nginx's number for a client that closed the connection before its answer
_SCOPE_KEY = "mini_vllm.request_log"
_QUIET_PATHS = frozenset({"/health", "/metrics"})  # asked every few seconds by machines
MAX_PROMPT_SHOWN = 200  # characters, with --log-prompts


@dataclass
class RequestLog:
    """What is known of a request.

    Args:
        request_id: the client's X-Request-Id, or one of ours.
        status: of the answer; 499 if the client left before it.
        seconds: from the request's head to the end of its answer.
        prompt_tokens, completion_tokens, first_token_seconds, finish_reasons: of a request for text.
        error: why it was refused or failed.
        prompt: the beginning of its text, only with --log-prompts.
    """

    request_id: str
    method: str
    path: str
    status: int = CLIENT_GONE
    seconds: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    first_token_seconds: float | None = None
    finish_reasons: list[str] | None = None
    error: str | None = None
    prompt: str | None = None

    def write(self) -> None:
        """Write the line. Answers to machines that look in all the time are for the debug level."""
        access_logger.log(
            logging.DEBUG if self.path in _QUIET_PATHS else logging.INFO, "%s", self._line(), extra={"request": self}
        )

    def _line(self) -> str:
        parts = [f"{self.method} {self.path} {self.status} in {self.seconds:.3f} s", f"id={self.request_id}"]
        if self.completion_tokens is not None:
            first = "" if self.first_token_seconds is None else f", first after {self.first_token_seconds:.3f} s"
            reasons = ", ".join(dict.fromkeys(self.finish_reasons or ["client gone"]))
            parts.append(f"{self.prompt_tokens} + {self.completion_tokens} tokens{first}, {reasons}")
        if self.error is not None:
            parts.append(f"error={self.error!r}")
        if self.prompt is not None:
            parts.append(f"prompt={self.prompt!r}")
        return "  ".join(parts)


def attach_log(scope: Any, log: RequestLog) -> None:
    scope[_SCOPE_KEY] = log


def log_of(scope: Mapping[str, Any]) -> RequestLog:
    """The log entry of the request that is being answered."""
    return cast(RequestLog, scope[_SCOPE_KEY])


def set_up_logging(log_format: LogFormat) -> None:
    """Send the logs of mini vLLM and of uvicorn to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    for name, level in (("mini_vllm", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {"time": record.created, "level": record.levelname, "logger": record.name}
        request = getattr(record, "request", None)
        if isinstance(request, RequestLog):
            entry.update((name, value) for name, value in asdict(request).items() if value is not None)
        else:
            entry["message"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json_line(entry)

"""`ServerConfig`: every option of the server that is not the engine's.

Where it stands: `mini-vllm serve` builds one from its flags beside an `EngineConfig`; the rest of `api/` only reads it.

What always holds: a config that exists is coherent; a bad value raises `InvalidConfigError` at construction.

In vLLM: `vllm/entrypoints/openai/cli_args.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from mini_vllm.errors import InvalidConfigError

LogFormat = Literal["text", "json"]
ToolParserName = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic", "none"]
ReasoningParserName = Literal["auto", "deepseek_r1", "qwen3", "none"]

_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "log_format": get_args(LogFormat),
        "tool_call_parser": get_args(ToolParserName),
        "reasoning_parser": get_args(ReasoningParserName),
    }
)


@dataclass(frozen=True)
class ServerConfig:
    """Options of the HTTP server.

    Args:
        host: address to listen at; 0.0.0.0 is every one of this machine, and then --api-key is advisable.
        port: port to listen at; 0 takes a free one.
        api_key: a key that clients must send as `Authorization: Bearer KEY`; any of several will do.
        allowed_origins: web pages of this origin may call the server (CORS); `*` is every one.
        max_queue_size: sequences that may wait beyond the max_num_seqs that run; more are refused with 429.
        max_body_size: largest request body in bytes; more is refused with 413.
        request_timeout: seconds after which a request is ended; none unless given.
        shutdown_timeout: seconds that running requests get to finish after SIGTERM or Ctrl-C.
        step_timeout: seconds after which one step of the engine counts as stuck, and the server gives up.
        heartbeat: seconds without a token after which a stream gets a comment, so that proxies keep it open.
        tool_call_parser: form in which the model writes function calls; `auto` reads it from the chat template, `none`
            refuses tools.
        reasoning_parser: tags in which the model thinks, shown as reasoning_content; `auto` reads them from the chat
            template, `none` leaves them in the content.
        log_format: `text` for people, `json` for programs; a line a request.
        log_prompts: write prompts into the log, which otherwise has no text of any request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Sequence[str] | None = None
    allowed_origins: Sequence[str] | None = None
    max_queue_size: int = 2048
    max_body_size: int = 8 * 2**20
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    step_timeout: float = 300.0
    heartbeat: float = 10.0
    tool_call_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    log_format: LogFormat = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise InvalidConfigError(f"host must be an address, got {self.host!r}", field="host")
        self._check_whole("port", 0, 65535)
        self._check_whole("max_queue_size", 0)
        self._check_whole("max_body_size", 1024)
        for name in ("request_timeout", "step_timeout", "heartbeat"):
            if name != "request_timeout" or self.request_timeout is not None:
                self._check_seconds(name, may_be_zero=False)
        self._check_seconds("shutdown_timeout", may_be_zero=True)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise InvalidConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", field=name)
        if not isinstance(self.log_prompts, bool):
            raise InvalidConfigError(
                f"log_prompts must be true or false, got {self.log_prompts!r}", field="log_prompts"
            )
        for name in ("api_key", "allowed_origins"):
            self._check_headers(name)

    def _check_whole(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            wanted = f"of {low} or more" if high is None else f"from {low} to {high}"
            raise InvalidConfigError(f"{name} must be a whole number {wanted}, got {value!r}", field=name)

    def _check_seconds(self, name: str, *, may_be_zero: bool) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (value == 0 and not may_be_zero):
            raise InvalidConfigError(
                f"{name} must be {'0 seconds or more' if may_be_zero else 'over 0 seconds'}, got {value!r}", field=name
            )

    def _check_headers(self, name: str) -> None:
        """Texts that are compared with what stands in a header."""
        values = getattr(self, name)
        if isinstance(values, str) or not isinstance(values, (Sequence, type(None))):
            raise InvalidConfigError(f"{name} must be a list of texts", field=name)  # a key is not shown to a log
        for value in values or ():
            if not isinstance(value, str) or not re.fullmatch("[!-~]+", value):
                raise InvalidConfigError(
                    f"{name} must be made of printable ASCII characters without blanks, as a header carries it",
                    field=name,
                )

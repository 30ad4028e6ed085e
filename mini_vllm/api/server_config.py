"""`ServerConfig`: every option of the server that is not the engine's.

Where it stands: `mini-vllm serve` builds one from its flags beside an `EngineConfig`; the rest of `api/` only reads it.

What always holds: a config that exists is coherent; a bad value raises `InvalidConfigError` at construction.

In vLLM: `vllm/entrypoints/openai/cli_args.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mini_vllm.errors import InvalidConfigError

LogFormat = Literal["text", "json"]


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
    log_format: LogFormat = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidConfigError(f"port must be from 0 to 65535, got {self.port}", field="port")
        for name, low in (("max_queue_size", 0), ("max_body_size", 1024)):
            if getattr(self, name) < low:
                raise InvalidConfigError(f"{name} must be {low} or more, got {getattr(self, name)}", field=name)
        for name in ("request_timeout", "step_timeout", "heartbeat"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidConfigError(f"{name} must be over 0 seconds, got {value}", field=name)
        if not self.shutdown_timeout >= 0:
            raise InvalidConfigError(
                f"shutdown_timeout must be 0 seconds or more, got {self.shutdown_timeout}", field="shutdown_timeout"
            )
        if self.log_format not in get_args(LogFormat):
            raise InvalidConfigError(f"log_format must be text or json, got {self.log_format!r}", field="log_format")
        for key in self.api_key or ():
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidConfigError(
                    "api_key must be made of printable ASCII characters without blanks, as it is sent in a header",
                    field="api_key",
                )

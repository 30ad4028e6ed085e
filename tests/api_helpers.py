"""A real server on a free port, over an engine made of doubles, and a client that reads its streams strictly."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from engine_doubles import ScriptedModel, make_engine

from mini_vllm.api.lifecycle import Lifecycle, Phase
from mini_vllm.api.server import create_app
from mini_vllm.api.server_config import ServerConfig
from mini_vllm.engine.llm_engine import LLMEngine

DEADLINE = 30.0


def alphabet(_: int, position: int) -> Mapping[int, float]:
    """The script that writes the letter of each position, for ever: after 'ab' comes 'cdef...'."""
    return {97 + (position + 1) % 26: 10.0, 65 + (position + 1) % 26: 8.0}


class Gate:
    """A script that stops at each token until it is let through, so that a request can be met in the middle."""

    def __init__(self, script: Callable[[int, int], Mapping[int, float]] = alphabet) -> None:
        self._script = script
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, token_id: int, position: int) -> Mapping[int, float]:
        self.reached.set()
        assert self.opened.wait(DEADLINE), "nobody opened the gate"
        return self._script(token_id, position)


def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"waited {DEADLINE:g} s for {what}"
        time.sleep(0.005)


@dataclass
class Streamed:
    """A whole stream, as its events."""

    status: int
    headers: httpx.Headers
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    num_done: int = 0

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [one for chunk in self.chunks for one in chunk.get("choices", []) if one["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(
            (one["delta"].get("content", "") if "delta" in one else one["text"]) for one in self.choices(index)
        )

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [one["finish_reason"] for one in self.choices(index) if one["finish_reason"] is not None]


def read_stream(lines: Iterator[str], streamed: Streamed) -> Streamed:
    for line in lines:
        assert streamed.num_done == 0 or line == "", f"after [DONE] came {line!r}"
        if line.startswith(":"):
            streamed.comments += 1
        elif line == "data: [DONE]":
            streamed.num_done += 1
        elif line:
            assert line.startswith("data: "), line
            streamed.chunks.append(strict_json(line[6:]))
    return streamed


def strict_json(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


class Served:
    """A running server."""

    def __init__(self, lifecycle: Lifecycle, url: str, server: uvicorn.Server) -> None:
        self.lifecycle = lifecycle
        self.url = url
        self.server = server
        self.http = httpx.Client(base_url=url, timeout=DEADLINE, trust_env=False)

    @property
    def engine(self) -> LLMEngine:
        return self.lifecycle._engine.engine  # type: ignore[union-attr]  # also when the server takes nobody any more

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def ok(self, path: str, body: Any) -> Any:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return strict_json(response.text)

    def complete(self, prompt: Any = "ab", **fields: Any) -> Any:
        return self.ok("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    def chat(self, text: str = "hi", **fields: Any) -> Any:
        messages = [{"role": "user", "content": text}]
        return self.ok("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})

    def stream(self, path: str, body: Mapping[str, Any]) -> Streamed:
        with self.http.stream("POST", path, json={"temperature": 0, **body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            return read_stream(response.iter_lines(), Streamed(response.status_code, response.headers))

    def stream_complete(self, prompt: Any = "ab", **fields: Any) -> Streamed:
        return self.stream("/v1/completions", {"prompt": prompt, **fields})

    def stream_chat(self, text: str = "hi", **fields: Any) -> Streamed:
        return self.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def metrics(self) -> dict[str, float]:
        """Samples by name, with labels but the model's: `request_success_total{finished_reason="stop"}`."""
        samples = {}
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.replace('model_name="double",', "").replace(',model_name="double"', "")
                samples[name.replace('{model_name="double"}', "").removeprefix("mini_vllm:")] = float(value)
        return samples

    def wait_until_quiet(self) -> None:
        """Nothing runs or waits, no block is in use, and a normal request is answered."""

        def is_quiet() -> bool:
            now = self.metrics()
            gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return all(now[name] == 0 for name in gauges) and self.lifecycle._num_sequences == 0

        until(is_quiet, "a quiet server")
        self.engine.scheduler.check()


@contextmanager
def serving(
    model: Any = None,
    *,
    server: Mapping[str, Any] | None = None,
    load: Callable[[], LLMEngine] | None = None,
    waits: bool = True,
    **options: Any,
) -> Iterator[Served]:
    """A server over `make_engine(model, **options)`; `server` are fields of ServerConfig."""
    config = ServerConfig(**{"shutdown_timeout": 0, **(server or {})})
    lifecycle = Lifecycle(config, load or (lambda: make_engine(model or ScriptedModel(alphabet), **options)))
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    app = create_app(lifecycle)
    process = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=process.run, args=([sock],), name="test-server")
    thread.start()
    served = Served(lifecycle, f"http://127.0.0.1:{sock.getsockname()[1]}", process)
    try:
        until(lambda: process.started, "the server's start")
        if waits:
            until(lambda: lifecycle.phase is not Phase.LOADING, "the engine")
        yield served
    finally:
        served.http.close()
        process.should_exit = True
        thread.join(DEADLINE)
        assert not thread.is_alive(), "the server did not end"

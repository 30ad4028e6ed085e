"""The process of a server: uvicorn, its signals, its exit code.

    SIGTERM, Ctrl-C      stop accepting; running requests finish, or are cut at --shutdown-timeout; exit 0
    a second signal      exit at once, 128 + its number
    a failed engine      everyone who waits gets an error; exit 1
    a failed load        the error, as any command shows it

Where it stands: `mini-vllm serve` calls `run_server`.

In vLLM: `vllm/entrypoints/launcher.py`.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import socket
from types import FrameType

import uvicorn

from mini_vllm.api.access_log import set_up_logging
from mini_vllm.api.lifecycle import Lifecycle, Phase
from mini_vllm.api.server import create_app
from mini_vllm.api.server_config import ServerConfig
from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.errors import InvalidConfigError, MiniVLLMError

logger = logging.getLogger(__name__)

LAST_WORDS = 5.0  # seconds that requests cut at the end get to send what they have
# Seconds that an idle connection is kept. Longer than clients and proxies keep theirs (5 to 60): if the server closes
# first, it may do so at the moment when the next request is sent, and that request is lost.
KEEP_ALIVE = 75
GC_THRESHOLDS = (10_000, 10, 10)
_M_ARENA_MAX = -8  # of glibc's malloc.h
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_server(config: ServerConfig, load: Callable[[], LLMEngine]) -> int:
    """Serve until a signal or a failure.

    Args:
        config: the server's options.
        load: makes the engine; called in a thread, while /health already answers.

    Returns:
        The exit code.

    Raises:
        MiniVLLMError: the model could not be loaded, or the address is taken.
    """
    set_up_logging(config.log_format)
    _keep_memory_together()
    lifecycle = Lifecycle(config, calm_collector_after(load))
    options = uvicorn.Config(
        create_app(lifecycle),
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(config.shutdown_timeout + LAST_WORDS),
    )
    sock = _listening_socket(options)
    host, port = sock.getsockname()[:2]
    shown_host = f"[{host}]" if ":" in host else host
    logger.info("listening at http://%s:%d; the model is loading", shown_host, port)
    _Process(options, lifecycle).run([sock])
    if lifecycle.is_loading:  # nothing can interrupt it, and the interpreter would wait for its native code
        sys.stderr.flush()
        os._exit(0)
    if isinstance(lifecycle.failure, MiniVLLMError) and lifecycle.phase is not Phase.READY:
        raise lifecycle.failure
    if lifecycle.failure is not None:
        logger.error("the server has failed", exc_info=lifecycle.failure)
        return 1
    return 0


def calm_collector_after(load: Callable[[], LLMEngine]) -> Callable[[], LLMEngine]:
    """The same loader, after which Python's garbage collector stops nobody for long.

    Modules, vocabulary and model are hundreds of thousands of objects that stay; full collections go through them all,
    and meanwhile, for 0.2 s and more, no thread runs. So they are set aside. What requests leave behind goes by
    itself, but for the cycles in a few of them: looking for these at every 10,000 new objects is often enough.
    """

    def load_and_calm() -> LLMEngine:
        engine = load()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        return engine

    return load_and_calm


def _keep_memory_together() -> None:
    """Have glibc use two heaps, not eight a core: what one thread has freed, others can use.

    After texts of megabytes, which the tokenizer's threads take in turn, some 100 MB less stay in use.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 2)


def _listening_socket(options: uvicorn.Config) -> socket:
    """Bound before anything is loaded, so that a taken port is known at once."""
    import socket as sockets

    family = sockets.AF_INET6 if ":" in options.host else sockets.AF_INET
    # With its protocol named, as asyncio sends small packets at once (TCP_NODELAY) only where it sees that it is TCP;
    # else the second part of each answer, and each event of a stream, would wait 40 ms for the first one's receipt.
    sock = sockets.socket(family, sockets.SOCK_STREAM, sockets.IPPROTO_TCP)
    sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
    except OSError as error:
        sock.close()
        raise InvalidConfigError(
            f"cannot listen at {options.host}:{options.port}: {error.strerror or error}; choose another --port",
            field="port",
        ) from error
    return sock


class _Process(uvicorn.Server):
    """uvicorn with our signals and our end."""

    def __init__(self, options: uvicorn.Config, lifecycle: Lifecycle) -> None:
        super().__init__(options)
        self._lifecycle = lifecycle
        lifecycle.on_failure = self._stop

    def _stop(self) -> None:
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but without raising the signals again at the end: after them the exit code is 0."""
        earlier = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        logger.info("shutting down: running requests get %g s", self._lifecycle.config.shutdown_timeout)
        self._lifecycle.begin_shutdown()
        await super().shutdown(sockets)

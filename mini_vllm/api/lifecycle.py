"""The life of a server: loading, ready, shutting down, failed; and who may come in.

                  load fails
    loading ------------------------> failed ----> the process ends with an error
       |                                ^
       | model is there                 | the engine's thread dies, or a step hangs
       v                                |
     ready -----------------------------'
       |
       | SIGTERM, Ctrl-C
       v
    shutting down: nobody new; running requests finish, or are cut at --shutdown-timeout ----> the process ends with 0

What always holds:
- A request gets its answer or an error; nobody waits for an engine that is gone.
- At most max_num_seqs + max_queue_size sequences are in the server.

In vLLM: `vllm/entrypoints/launcher.py` and `vllm/v1/engine/async_llm.py`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client.core import Metric

from mini_vllm.api.errors import ApiError
from mini_vllm.api.metrics import EngineMetrics, HttpMetrics
from mini_vllm.api.server_config import ServerConfig
from mini_vllm.engine.async_engine import AsyncLLMEngine
from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.errors import EngineDeadError

logger = logging.getLogger(__name__)

WATCH_INTERVAL = 0.5  # seconds between two looks at the engine
RETRY_AFTER_LOADING = 5
RETRY_AFTER_FULL = 1


class Phase(enum.Enum):
    """Where a server stands. The values are what /health shows."""

    LOADING = "loading"
    READY = "ok"
    SHUTTING_DOWN = "shutting down"
    FAILED = "failed"


class Lifecycle:
    """The state of one server. All of it belongs to the event loop.

    Args:
        config: the server's options.
        load: makes the engine, in a thread of its own.
    """

    def __init__(self, config: ServerConfig, load: Callable[[], LLMEngine]) -> None:
        self.config = config
        self.http_metrics = HttpMetrics()
        self.engine_metrics: EngineMetrics | None = None
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._load = load
        self._loader: threading.Thread | None = None
        self._engine: AsyncLLMEngine | None = None
        self._is_shutting_down = False
        self._num_sequences = 0
        self._watcher: asyncio.Task[None] | None = None

    @property
    def phase(self) -> Phase:
        if self.failure is not None or self._engine_failure() is not None:
            return Phase.FAILED
        if self._is_shutting_down:
            return Phase.SHUTTING_DOWN
        return Phase.LOADING if self._engine is None else Phase.READY

    @property
    def failure_text(self) -> str | None:
        failure = self.failure or self._engine_failure()
        return None if failure is None else str(failure)

    @property
    def is_loading(self) -> bool:
        """Whether the loading thread is at work, which nothing can interrupt."""
        return self._loader is not None and self._loader.is_alive()

    # ---- from start to end ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load. Called in the event loop."""
        loop = asyncio.get_running_loop()
        self._loader = threading.Thread(target=self._load_in_thread, args=(loop,), name="mini-vllm-loader", daemon=True)
        self._loader.start()
        self._watcher = asyncio.create_task(self._watch())

    def _load_in_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            outcome = partial(self._attach, self._load())
        except BaseException as error:
            outcome = partial(self._fail, error)
        try:
            loop.call_soon_threadsafe(outcome)
        except RuntimeError:  # the server was shut down meanwhile
            logger.info("the model was loaded after the server had been shut down")

    def _attach(self, engine: LLMEngine) -> None:
        self.engine_metrics = EngineMetrics(engine.model_name)
        self._engine = AsyncLLMEngine(engine, on_outputs=self.engine_metrics.observe)
        logger.info("ready: %s, up to %d tokens a request", engine.model_name, engine.config.max_model_len)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.on_failure()

    async def _watch(self) -> None:
        """Look after the engine: a failure is told to everyone who waits."""
        while self.failure is None:
            await asyncio.sleep(min(WATCH_INTERVAL, self.config.step_timeout / 4))
            failure = self._engine_failure()
            if failure is not None and self._engine is not None and not self._is_shutting_down:
                logger.error("giving up: %s", failure)
                self._engine.give_up(failure)
                self._fail(failure)

    def _engine_failure(self) -> EngineDeadError | None:
        if self._engine is None:
            return None
        if self._engine.seconds_in_step > self.config.step_timeout:
            return EngineDeadError(
                f"the engine is stuck: its step has been running for {self._engine.seconds_in_step:.0f} s "
                f"(--step-timeout {self.config.step_timeout:g})"
            )
        try:
            self._engine.check_health()
        except EngineDeadError as error:
            return error
        return None

    def begin_shutdown(self) -> None:
        """Let nobody in any more; cut what still runs after the shutdown timeout."""
        if not self._is_shutting_down:
            self._is_shutting_down = True
            asyncio.get_running_loop().call_later(self.config.shutdown_timeout, self._cut)

    def _cut(self) -> None:
        if self._engine is not None:
            self._engine.abort_all()

    async def stop(self) -> None:
        """End the engine. Called when no request is left, or when those that are do not count any more."""
        self._is_shutting_down = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown, 5.0)

    # ---- for routes -------------------------------------------------------------------------------------------

    def engine(self) -> AsyncLLMEngine:
        """The engine, if requests may come in.

        Raises:
            ApiError: 503, with the reason.
        """
        phase = self.phase
        if self._engine is not None and phase is Phase.READY:
            return self._engine
        if phase is Phase.LOADING:
            raise ApiError(503, "the model is still loading", code="loading", retry_after=RETRY_AFTER_LOADING)
        if phase is Phase.SHUTTING_DOWN:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=RETRY_AFTER_LOADING)
        raise ApiError(503, self.failure_text or "the engine has failed", code="engine_dead")

    @contextmanager
    def admitted(self, num_sequences: int) -> Iterator[None]:
        """A place for a request, from before its tokenising to the end of its answer.

        Raises:
            ApiError: 429, if the server is full. A request that is larger than the whole queue comes in when there is
                room at all, since it could never come in otherwise.
        """
        room = self.engine().engine.config.max_num_seqs + self.config.max_queue_size
        if self._num_sequences >= room:
            raise ApiError(
                429,
                f"the server is full: {self._num_sequences} sequences run or wait, and --max-queue-size allows {room} "
                "together; try again later",
                code="queue_full",
                retry_after=RETRY_AFTER_FULL,
            )
        self._num_sequences += num_sequences
        try:
            yield
        finally:
            self._num_sequences -= num_sequences

    def count_started(self, count: int) -> None:
        """Note that so many requests go to the engine."""
        if self.engine_metrics is not None:
            self.engine_metrics.num_started += count

    def metric_families(self) -> list[Metric]:
        """All series; those of the engine as soon as there is one."""
        families = list(self.http_metrics.families())
        if self._engine is not None and self.engine_metrics is not None:
            families += self.engine_metrics.families(self._engine)
        return families

    @property
    def cut_reason(self) -> str:
        """Why a running request was ended that nobody asked to end."""
        return "the server is shutting down" if self._is_shutting_down else "the request was aborted"

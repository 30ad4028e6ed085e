"""`AsyncLLMEngine`: the same engine in its own thread, behind asyncio.

Where it stands: between the HTTP server (or any asyncio program) and `LLMEngine`. The engine's thread is the only one
that touches the engine; callers hand work in through an inbox and take outputs from a stream of their own.

    caller's loop                      tokenizer threads            the engine's thread
    generate(...)  -- make_request --> checks, tokenises
                   -- inbox ------------------------------------->  additions and aborts
                                                                    step
    async for  <---- stream (one pending output) ----------------   outputs

What always holds:
- A stream holds at most one output. If its reader is slow the next outputs are merged into it: deltas are joined, so
  nothing is lost, memory is bounded by the answer's length, and nobody else waits.
- Leaving the `async for` in any way (done, break, cancelled task) ends the request in the engine.
- When the engine's thread dies every waiter gets `EngineDeadError` with the cause, and so does every later call.

In vLLM: `vllm/v1/engine/async_llm.py`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from mini_vllm.engine.input_processor import Prompt
from mini_vllm.engine.llm_engine import EngineStats, LLMEngine
from mini_vllm.engine.request import Request
from mini_vllm.errors import EngineDeadError
from mini_vllm.outputs import CompletionOutput, RequestOutput
from mini_vllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class AsyncLLMEngine:
    """Serves many asyncio tasks from one engine.

    Args:
        engine: an engine that nobody else uses from now on.
        tokenizer_threads: threads that check and tokenise requests.
    """

    def __init__(self, engine: LLMEngine, *, tokenizer_threads: int = 2) -> None:
        self.engine = engine
        self._tokenizers = ThreadPoolExecutor(tokenizer_threads, thread_name_prefix="mini-vllm-tokenizer")
        self._changed = threading.Condition()  # guards the four fields below
        self._additions: deque[tuple[Request, _Stream]] = deque()
        self._aborts: deque[str] = deque()
        self._stopping = False
        self._death: EngineDeadError | None = None
        self._streams: dict[str, _Stream] = {}  # only the engine's thread touches it
        self._step_started: float | None = None
        self._stats = engine.stats
        self._thread = threading.Thread(target=self._run, name="mini-vllm-engine", daemon=True)
        self._thread.start()

    # ---- for callers ------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt: outputs as they come, the last one `finished`. Arguments as `LLMEngine.add_request`.

        Raises:
            InvalidRequestError: the request is refused (at the first iteration).
            EngineDeadError: the engine has stopped, before or meanwhile.
        """
        self.check_health()
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(
            self._tokenizers,
            lambda: self.engine.make_request(
                prompt,
                sampling_params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                template_options=template_options,
            ),
        )
        stream = _Stream(loop)
        self._hand_in(request, stream)
        finished = False
        try:
            while not finished:
                output = await stream.take()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request before the engine's next step. An unknown id is ignored."""
        with self._changed:
            self._aborts.append(request_id)
            self._changed.notify()

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has stopped."""
        if self._death is not None:
            raise self._death

    @property
    def stats(self) -> EngineStats:
        """Figures as of the end of the last step, or of the last change while idle."""
        return self._stats

    @property
    def seconds_in_step(self) -> float:
        """How long the current step has been running; 0 between steps. A large number means that it is stuck."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine's thread; whoever still waits gets EngineDeadError.

        Args:
            timeout: seconds to wait for the current step; None waits for its end.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout)
        self._tokenizers.shutdown(wait=False, cancel_futures=True)

    # ---- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        death = EngineDeadError("the engine has been shut down")
        try:
            while self._wait_for_work():
                self._step_started = time.monotonic()
                outputs = self.engine.step()
                self._step_started = None
                self._stats = self.engine.stats
                self._deliver(outputs)
        except BaseException as error:
            logger.exception("the engine's thread has died")
            death = EngineDeadError(f"the engine has stopped: {type(error).__name__}: {error}")
            death.__cause__ = error
        self._die(death)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do, apply additions and aborts; False once it is time to stop."""
        with self._changed:
            while not (self._stopping or self._additions or self._aborts or self.engine.has_unfinished_requests()):
                self._changed.wait()
            additions, self._additions = self._additions, deque()
            aborts, self._aborts = self._aborts, deque()
            if self._stopping:
                self._additions = additions  # `_die` tells them
                return False
        for request, stream in additions:
            self._streams[request.request_id] = stream
            self.engine.enqueue(request)
        for request_id in aborts:
            self.engine.abort_request(request_id)
        return True

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Put outputs into their streams, and wake each event loop once."""
        woken: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        for output in outputs:
            stream = self._streams[output.request_id]
            if output.finished:
                del self._streams[output.request_id]
            if stream.put(output):
                woken.setdefault(stream.loop, []).append(stream)
        for loop, streams in woken.items():
            _call_in(loop, streams)

    def _hand_in(self, request: Request, stream: _Stream) -> None:
        with self._changed:
            if self._death is not None:
                raise self._death
            self._additions.append((request, stream))
            self._changed.notify()

    def _die(self, death: EngineDeadError) -> None:
        with self._changed:
            self._death = death
            waiting = [*self._streams.values(), *(stream for _, stream in self._additions)]
            self._additions.clear()
        self._streams.clear()
        for stream in waiting:
            stream.fail(death)
            _call_in(stream.loop, [stream])
        self.engine.shutdown()


class _Stream:
    """The way of one request's outputs from the engine's thread to one reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._pending: RequestOutput | None = None
        self._failure: EngineDeadError | None = None

    def put(self, output: RequestOutput) -> bool:
        """Leave an output for the reader; merge it if the last one is still there. True if it must be woken."""
        with self._lock:
            is_new = self._pending is None
            self._pending = output if self._pending is None else merge_outputs(self._pending, output)
            return is_new

    def fail(self, failure: EngineDeadError) -> None:
        with self._lock:
            self._failure = failure

    def wake(self) -> None:
        """Runs in the reader's loop."""
        self._arrived.set()

    async def take(self) -> RequestOutput:
        """The next output. What came before a failure is delivered first."""
        while True:
            with self._lock:
                output, self._pending = self._pending, None
                if output is not None:
                    return output
                if self._failure is not None:
                    raise self._failure
                self._arrived.clear()
            await self._arrived.wait()


def merge_outputs(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request as one: the deltas joined, all else as in the later one."""
    earlier = {choice.index: choice for choice in first.outputs}
    choices = [
        _merge_choices(earlier[choice.index], choice) if choice.index in earlier else choice
        for choice in second.outputs
    ]
    return replace(second, outputs=choices)


def _merge_choices(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    logprobs, texts = second.delta_logprobs, second.delta_token_texts
    return replace(
        second,
        delta_text=first.delta_text + second.delta_text,
        delta_token_ids=first.delta_token_ids + second.delta_token_ids,
        delta_logprobs=None if logprobs is None else (first.delta_logprobs or []) + logprobs,
        delta_token_texts=None if texts is None else (first.delta_token_texts or []) + texts,
    )


def _call_in(loop: asyncio.AbstractEventLoop, streams: list[_Stream]) -> None:
    def wake_all() -> None:
        for stream in streams:
            stream.wake()

    try:
        loop.call_soon_threadsafe(wake_all)
    except RuntimeError:  # the reader's loop is closed: nobody is there to be woken
        logger.debug("a reader's event loop was closed before its request ended")

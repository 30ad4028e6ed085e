"""`AsyncLLMEngine`: the same engine in its own thread, behind asyncio.

Where it stands: between the HTTP server (or any asyncio program) and `LLMEngine`. The engine's thread is the only one
that touches the engine; callers hand work in through an inbox and take outputs from a stream of their own.

    caller's loop                      tokenizer threads            the engine's thread
    make_request(...) ---------------> checks, tokenises
    run(requests)  -- inbox ------------------------------------->  additions and aborts
                                                                    step
    async for  <---- stream (one pending output a request) ------   outputs

What always holds:
- A stream holds at most one output of each of its requests. If its reader is slow the next outputs are merged into it:
  deltas are joined, so nothing is lost, memory is bounded by the answer's length, and nobody else waits.
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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from mini_vllm.engine.llm_engine import EngineStats, LLMEngine
from mini_vllm.engine.output_stream import OutputStream
from mini_vllm.engine.prompts import Prompt
from mini_vllm.engine.request import Request
from mini_vllm.errors import EngineDeadError
from mini_vllm.outputs import RequestOutput
from mini_vllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class AsyncLLMEngine:
    """Serves many asyncio tasks from one engine.

    Args:
        engine: an engine that nobody else uses from now on.
        tokenizer_threads: threads that check and tokenise requests.
        on_outputs: called in the engine's thread with the outputs of each step, before their readers get them. It must
            be quick.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        tokenizer_threads: int = 2,
        on_outputs: Callable[[Sequence[RequestOutput]], None] | None = None,
    ) -> None:
        self.engine = engine
        self._on_outputs = on_outputs
        self._tokenizers = ThreadPoolExecutor(tokenizer_threads, thread_name_prefix="mini-vllm-tokenizer")
        # Compiling a form may take seconds; those who ask for none do not wait for those who do.
        self._compilers = ThreadPoolExecutor(tokenizer_threads, thread_name_prefix="mini-vllm-grammar")
        self._changed = threading.Condition()  # guards the four fields below
        self._additions: deque[tuple[Request, OutputStream]] = deque()
        self._aborts: deque[str] = deque()
        self._stopping = False
        self._death: EngineDeadError | None = None
        self._streams: dict[str, OutputStream] = {}  # only the engine's thread touches it
        self._open: set[OutputStream] = set()  # those with a reader
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
        request = await self.make_request(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            template_options=template_options,
        )
        async with aclosing(self.run([request])) as arrivals:
            async for outputs in arrivals:
                for output in outputs:
                    yield output

    async def make_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Request:
        """Check and tokenise, away from the event loop. Nothing is computed before `run`.

        Raises:
            InvalidRequestError: the request is refused.
            EngineDeadError: the engine has stopped.
        """
        return await self.in_tokenizer_thread(
            lambda: self.engine.make_request(
                prompt,
                sampling_params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                template_options=template_options,
            ),
            compiles=sampling_params.structured_outputs is not None,
        )

    async def in_tokenizer_thread(self, work: Callable[[], _Result], *, compiles: bool = False) -> _Result:
        """Run something that takes long on long texts, and touches no state, away from the event loop.

        Args:
            compiles: it may compile a form as well, and then goes to threads of its own.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        self.check_health()
        try:
            result = asyncio.get_running_loop().run_in_executor(self._compilers if compiles else self._tokenizers, work)
        except RuntimeError as error:  # the threads are gone: `shutdown` did not wait for the engine's own
            raise EngineDeadError("the engine has been shut down") from error
        return await result

    async def run(
        self, requests: Sequence[Request], *, only_final: bool = False, patience: float | None = None
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Compute requests that belong together; all of them end when the caller leaves.

        Args:
            requests: from `make_request`.
            only_final: wait for the final outputs; whoever shows nothing before the end is not woken at each token.
            patience: after so many seconds without an output, give an empty list.

        Raises:
            EngineDeadError: the engine has stopped, before or meanwhile.
        """
        live = {request.request_id for request in requests}
        stream = OutputStream(asyncio.get_running_loop(), frozenset(live), only_final=only_final)
        self._hand_in(requests, stream)
        try:
            while live:
                outputs = await stream.take(patience)
                live.difference_update(output.request_id for output in outputs if output.finished)
                yield outputs
        finally:
            self._open.discard(stream)
            for request_id in live:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request before the engine's next step. An unknown id is ignored."""
        with self._changed:
            self._aborts.append(request_id)
            self._changed.notify()

    def abort_all(self) -> None:
        """End every request. Who still reads gets a final output with finish reason `abort`."""
        for stream in list(self._open):
            for request_id in stream.request_ids:
                self.abort(request_id)

    def give_up(self, death: EngineDeadError) -> None:
        """Fail everyone who waits, now and later, without the engine's thread, which may hang."""
        with self._changed:
            self._death = death
            self._stopping = True
            self._changed.notify()
        self._fail(self._open, death)

    def check_health(self) -> None:
        """Raises EngineDeadError if the engine has stopped."""
        if self._death is not None:
            raise self._death

    @property
    def stats(self) -> EngineStats:
        """Figures as of the end of the last step, or of the last change while idle; requests just handed in wait."""
        handed_in = len(self._additions)
        return replace(self._stats, num_waiting=self._stats.num_waiting + handed_in) if handed_in else self._stats

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
        for threads in (self._tokenizers, self._compilers):
            threads.shutdown(wait=False, cancel_futures=True)

    # ---- the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        death = EngineDeadError("the engine has been shut down")
        try:
            while self._wait_for_work():
                self._step_started = time.monotonic()
                outputs = self.engine.step()
                self._step_started = None
                self._stats = self.engine.stats
                if self._on_outputs is not None:
                    self._on_outputs(outputs)
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
        if additions:
            self._stats = self.engine.stats
        for request_id in aborts:
            self.engine.abort_request(request_id)
        return True

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Put outputs into their streams, and wake each event loop once."""
        woken: dict[asyncio.AbstractEventLoop, list[OutputStream]] = {}
        for output in outputs:
            stream = self._streams[output.request_id]
            if output.finished:
                del self._streams[output.request_id]
            if stream.put(output):
                woken.setdefault(stream.loop, []).append(stream)
        for loop, streams in woken.items():
            _call_in(loop, streams)

    def _hand_in(self, requests: Sequence[Request], stream: OutputStream) -> None:
        with self._changed:
            if self._death is not None:
                raise self._death
            self._open.add(stream)
            self._additions.extend((request, stream) for request in requests)
            self._changed.notify()

    def _die(self, death: EngineDeadError) -> None:
        with self._changed:
            self._death = self._death or death
            self._additions.clear()
        self._streams.clear()
        self._fail(self._open, death)
        self.engine.shutdown()

    @staticmethod
    def _fail(streams: Collection[OutputStream], death: EngineDeadError) -> None:
        for stream in list(streams):
            stream.fail(death)
            _call_in(stream.loop, [stream])


def _call_in(loop: asyncio.AbstractEventLoop, streams: list[OutputStream]) -> None:
    def wake_all() -> None:
        for stream in streams:
            stream.wake()

    try:
        loop.call_soon_threadsafe(wake_all)
    except RuntimeError:  # the reader's loop is closed: nobody is there to be woken
        logger.debug("a reader's event loop was closed before its request ended")

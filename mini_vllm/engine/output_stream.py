"""The way of outputs from the engine's thread to one reader.

    engine's thread   put(output)  ->  one pending output a request  ->  take()   reader's event loop

Where it stands: `AsyncLLMEngine` makes one for each reader, puts into it after each step, and reads from it in `run`.

What always holds: it holds at most one output of each request. If its reader is slow the next outputs are merged into
it: deltas are joined, so nothing is lost, and memory is bounded by the answer's length.

In vLLM: `RequestOutputCollector` in `vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace

from mini_vllm.errors import EngineDeadError
from mini_vllm.outputs import RequestOutput


class OutputStream:
    """The way of the outputs of one reader's requests from the engine's thread to the reader.

    Args:
        loop: the reader's.
        request_ids: of the requests whose outputs come here.
        only_final: drop all outputs but the final ones.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, request_ids: frozenset[str], *, only_final: bool) -> None:
        self.loop = loop
        self.request_ids = request_ids
        self._only_final = only_final
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._pending: dict[str, RequestOutput] = {}
        self._failure: EngineDeadError | None = None
        self._is_out_of_patience = False

    def put(self, output: RequestOutput) -> bool:
        """Leave an output for the reader; merge it if the last one is still there. True if it must be woken."""
        if self._only_final and not output.finished:
            return False
        with self._lock:
            is_first = not self._pending
            earlier = self._pending.get(output.request_id)
            self._pending[output.request_id] = output if earlier is None else merge_outputs(earlier, output)
            return is_first

    def fail(self, failure: EngineDeadError) -> None:
        with self._lock:
            self._failure = failure

    def wake(self) -> None:
        """Runs in the reader's loop."""
        self._arrived.set()

    async def take(self, patience: float | None) -> list[RequestOutput]:
        """What has arrived since the last call; waits for it, but no longer than `patience` seconds.

        What came before a failure is delivered first.
        """
        outputs = self._collect()
        if outputs:
            return outputs
        self._is_out_of_patience = False
        # Not all of it: a thousand streams that began to wait together would all be woken together, time after time.
        wait = None if patience is None else patience * random.uniform(0.5, 1.0)
        timer = None if wait is None else self.loop.call_later(wait, self._lose_patience)
        try:
            while not outputs and not self._is_out_of_patience:
                await self._arrived.wait()
                outputs = self._collect()
            return outputs
        finally:
            if timer is not None:
                timer.cancel()

    def _lose_patience(self) -> None:
        self._is_out_of_patience = True
        self._arrived.set()

    def _collect(self) -> list[RequestOutput]:
        with self._lock:
            outputs, self._pending = list(self._pending.values()), {}
            if not outputs and self._failure is not None:
                raise self._failure
            self._arrived.clear()
            return outputs


def merge_outputs(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one request as one: the deltas joined, all else as in the later one."""
    starts = {choice.index: choice.start for choice in first.outputs}
    choices = [replace(choice, start=starts.get(choice.index, choice.start)) for choice in second.outputs]
    return replace(second, outputs=choices)

"""The load generator: requests at their times to a server, and what each client sees.

Where it stands: between `serving.py`, which says what to send and when, and `http_stream.py`. It knows the server by
its URL alone.

What always holds: tokens are counted from what came back: by their ids where the server sends them, else as the usage
at the end of the stream says. An answer without either has failed.

In vLLM: `vllm/benchmarks/serve.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from mini_vllm.benchmark.http_stream import HttpFailure, Server, get_json, stream_events
from mini_vllm.benchmark.options import ServingOptions
from mini_vllm.benchmark.progress import Progress
from mini_vllm.benchmark.records import BenchmarkError
from mini_vllm.benchmark.workload import WorkItem, Workload
from mini_vllm.json_text import parse_json
from mini_vllm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedRequest:
    """One request as its client saw it; times in seconds.

    Args:
        arrival: when it was due.
        token_times: when each token came in; tokens of one event came in together.
        num_prompt_tokens, num_output_tokens, num_cached_tokens: as the server counts them; output by its ids where it
            sends them.
        num_wanted_tokens: that were asked for.
        error: why it failed; None if it did not.
    """

    arrival: float
    token_times: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_wanted_tokens: int
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def time_per_output_token(self) -> float:
        """After the first; 0 for an answer of one token."""
        later = self.num_output_tokens - 1
        return (self.token_times[-1] - self.token_times[0]) / later if later else 0.0

    @property
    def end_to_end(self) -> float:
        return self.token_times[-1] - self.arrival

    def is_good(self, options: ServingOptions) -> bool:
        """Both limits hold."""
        return self.time_to_first_token <= options.ttft_limit and self.time_per_output_token <= options.tpot_limit


async def served_model(server: Server, options: ServingOptions) -> str:
    """The name to ask for: the given one, else the first that the server lists.

    Raises:
        BenchmarkError: it lists none, or does not answer.
    """
    if options.served_model is not None:
        return options.served_model
    try:
        listed = await get_json(server, "/v1/models")
    except HttpFailure as failure:
        raise BenchmarkError(f"{options.url} does not say which model it serves: {failure}") from failure
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise BenchmarkError(f"{options.url}/v1/models lists no model; give its name with --served-model") from error


class LoadClient:
    """Sends the requests of a run and reads what comes back."""

    def __init__(
        self, server: Server, options: ServingOptions, model: str, tokenizer: Tokenizer, progress: Progress
    ) -> None:
        self.model = model
        self._server = server
        self._options = options
        self._tokenizer = tokenizer
        self._progress = progress

    async def warm_up(self, workload: Workload) -> None:
        """One request that does not count."""
        record = await self._request(workload.items[0], time.perf_counter())
        if record.error is not None:
            raise BenchmarkError(f"the first request to {self._options.url} failed: {record.error}")

    async def run(self, workload: Workload, arrivals: Sequence[float], title: str) -> list[ServedRequest]:
        """All requests, each at its time."""
        self._progress.begin(title, workload.num_output_tokens)
        limit = self._options.max_concurrency
        gate = None if limit is None else asyncio.Semaphore(limit)
        started = time.perf_counter()

        async def one(item: WorkItem, due: float) -> ServedRequest:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            async with AsyncExitStack() as held:
                if gate is not None:
                    await held.enter_async_context(gate)
                return await self._request(item, due)

        sent = (one(item, started + arrival) for item, arrival in zip(workload.items, arrivals, strict=True))
        return list(await asyncio.gather(*sent))

    async def _request(self, item: WorkItem, due: float) -> ServedRequest:
        reading = _Reading()
        try:
            await asyncio.wait_for(self._read(item, reading), self._options.timeout)
            error = reading.fault()
        except HttpFailure as failure:
            error = reading.bad_event or str(failure)
        except asyncio.TimeoutError:
            error = f"no whole answer within {self._options.timeout:g} s"
        return reading.record(item, due, error)

    async def _read(self, item: WorkItem, reading: _Reading) -> None:
        path = "/v1/completions" if self._options.endpoint == "completions" else "/v1/chat/completions"
        async with aclosing(stream_events(self._server, path, self._body(item))) as events:
            async for event in events:
                self._progress.advance(reading.take(event, time.perf_counter()))

    def _body(self, item: WorkItem) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.num_output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._options.plain:
            body |= {"ignore_eos": True, "return_token_ids": True}
        if self._options.endpoint == "completions":
            return {**body, "prompt": list(item.prompt_token_ids)}
        return {**body, "messages": [{"role": "user", "content": self._tokenizer.decode(item.prompt_token_ids)}]}


class _Reading:
    """One answer as it comes in."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._has_ids = False
        self._usage: Mapping[str, Any] = {}
        self.bad_event: str | None = None  # what was wrong with the last event that was

    def take(self, event: str, now: float) -> int:
        """Note an event; how many tokens were in it, as far as it shows."""
        try:
            chunk = parse_json(event)
            if "error" in chunk:
                self.bad_event = str(chunk["error"])
            self._usage = chunk.get("usage") or self._usage
            count = sum(self._tokens_in(choice) for choice in chunk.get("choices") or ())
        except (ValueError, TypeError, AttributeError) as error:
            self.bad_event = f"an event that is none of OpenAI's ({error}): {event[:100]}"
            return 0
        self._times += [now] * count
        return count

    def _tokens_in(self, choice: Mapping[str, Any]) -> int:
        ids = choice.get("token_ids")
        if ids is not None:
            self._has_ids = True
            return len(ids)
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        return 1 if text and not self._has_ids else 0

    def fault(self) -> str | None:
        """Why this is no answer, or None."""
        if self.bad_event is None and not self._times:
            return "the answer had no tokens"
        if self.bad_event is None and not self._usage:
            return "the answer came without usage, so its tokens cannot be counted"
        return self.bad_event

    def record(self, item: WorkItem, due: float, error: str | None) -> ServedRequest:
        details = self._usage.get("prompt_tokens_details") or {}
        return ServedRequest(
            arrival=due,
            token_times=tuple(self._times),
            num_prompt_tokens=self._usage.get("prompt_tokens") or 0,
            num_output_tokens=len(self._times) if self._has_ids else self._usage.get("completion_tokens") or 0,
            num_cached_tokens=details.get("cached_tokens") or 0,
            num_wanted_tokens=item.num_output_tokens,
            error=error,
        )

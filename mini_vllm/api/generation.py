"""The engine's requests behind one HTTP request, and what comes out of them, piece by piece.

    prompts ["A", "B"], n=2      request 0 -> choices 0, 1      request 1 -> choices 2, 3

Where it stands: `answering.py` makes a `Generation`; the writers of the endpoints show its pieces.

What always holds: the pieces of a choice join to its whole; a choice has one first piece and one with a finish reason;
leaving the generators, in any way, ends the requests in the engine.

In vLLM: the generators in `vllm/entrypoints/openai/*/serving.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mini_vllm.api.access_log import RequestLog
from mini_vllm.api.errors import ApiError
from mini_vllm.api.lifecycle import Lifecycle
from mini_vllm.engine.async_engine import AsyncLLMEngine
from mini_vllm.engine.request import Request
from mini_vllm.outputs import (
    GRAMMAR_FAILED,
    NO_TOKEN_LEFT,
    CompletionOutput,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
)


@dataclass(frozen=True)
class Piece:
    """A part of one answer, or all of it.

    Args:
        place: index of the choice, over all prompts.
        request: that it answers.
        text, token_ids: what is new.
        logprobs, token_texts: one entry a token; None unless asked for.
        is_first: nothing of this choice has been shown before.
        finish_reason, stop_reason: of its end; None before.
        prompt_logprobs: of the prompt; only in first pieces, if asked for.
    """

    place: int
    request: Request
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    token_texts: list[str] | None
    is_first: bool
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: list[TokenLogprobs | None] | None

    @property
    def has_text_or_end(self) -> bool:
        """Whether somebody who reads only the text would miss it."""
        return bool(self.text) or self.finish_reason is not None


class Usage:
    """Token counts of an HTTP request: each prompt once, and all answers."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.completion_tokens = 0
        self._cached: dict[str, int] = {}

    def count(self, output: RequestOutput, num_new_tokens: int) -> None:
        self.completion_tokens += num_new_tokens
        self._cached[output.request_id] = output.num_cached_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Generation:
    """The requests of one HTTP request, and their outputs.

    Args:
        answer_id: what the client sees as the answer's id.
        engine: that computes them.
        requests: one a prompt.
        log: to be filled with counts and times.
        lifecycle: says why a request was cut.
        shows_tokens: the client sees tokens, and not only their text; then pieces without text count as well.
    """

    def __init__(
        self,
        answer_id: str,
        engine: AsyncLLMEngine,
        requests: list[Request],
        log: RequestLog,
        lifecycle: Lifecycle,
        *,
        shows_tokens: bool,
    ) -> None:
        self.answer_id = answer_id
        self.created = int(time.time())
        self.model = engine.engine.model_name
        self.tokenizer = engine.engine.tokenizer
        self.requests = requests
        self.usage = Usage(requests)
        self.failure: ApiError | None = None
        self.num_choices = requests[0].params.n
        self.shows_tokens = shows_tokens
        self._engine = engine
        self._log = log
        self._lifecycle = lifecycle
        self._places = {request.request_id: index * self.num_choices for index, request in enumerate(requests)}
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._is_timed_out = False

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What is new, as it comes; an empty list if nothing has come for a while. `failure` is set before the end.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        async with aclosing(self._outputs(only_final=False)) as arrivals:
            async for outputs in arrivals:
                if not outputs:
                    yield []
                    continue
                pieces = [piece for output in outputs for piece in self._new_pieces(output)]
                if pieces:
                    yield pieces

    async def whole(self) -> list[Piece]:
        """All answers, in the order of their indexes.

        Raises:
            ApiError: one of them failed or was cut.
            EngineDeadError: the engine has stopped.
        """
        pieces: list[Piece] = []
        async with aclosing(self._outputs(only_final=True)) as arrivals:
            async for outputs in arrivals:
                for output in outputs:
                    pieces += [self._whole_piece(output, choice) for choice in output.outputs]
        if self.failure is not None:
            raise self.failure
        return sorted(pieces, key=lambda piece: piece.place)

    async def _outputs(self, *, only_final: bool) -> AsyncGenerator[list[RequestOutput], None]:
        """The engine's outputs, counted, under the time limit."""
        config, loop = self._lifecycle.config, asyncio.get_running_loop()
        timer = None
        if config.request_timeout is not None:
            timer = loop.call_later(config.request_timeout, self._time_out)
        run = self._engine.run(self.requests, only_final=only_final, patience=None if only_final else config.heartbeat)
        self._lifecycle.count_started(len(self.requests))
        self._log.prompt_tokens, self._log.completion_tokens = self.usage.prompt_tokens, 0
        try:
            async with aclosing(run) as arrivals:
                async for outputs in arrivals:
                    for output in outputs:
                        self._count(output, only_final=only_final)
                    yield outputs
        finally:
            if timer is not None:
                timer.cancel()

    def _time_out(self) -> None:
        self._is_timed_out = True
        for request in self.requests:
            self._engine.abort(request.request_id)

    def _count(self, output: RequestOutput, *, only_final: bool) -> None:
        new = (len(choice.token_ids if only_final else choice.delta_token_ids) for choice in output.outputs)
        self.usage.count(output, sum(new))
        log = self._log
        log.completion_tokens = self.usage.completion_tokens
        if log.first_token_seconds is None:
            log.first_token_seconds = output.metrics.time_to_first_token
        if output.finished:
            reasons = [str(choice.finish_reason) for choice in output.outputs]
            log.finish_reasons = [*(log.finish_reasons or ()), *reasons]
            self.failure = self.failure or self._failure(output)

    def _failure(self, output: RequestOutput) -> ApiError | None:
        """Why an answer did not end by itself, if it did not."""
        reasons = {choice.finish_reason for choice in output.outputs}
        if FinishReason.ERROR in reasons:
            error = output.error or "the computation failed"
            is_the_clients = error == NO_TOKEN_LEFT or error.startswith(GRAMMAR_FAILED)
            return ApiError(400 if is_the_clients else 500, error)
        if FinishReason.ABORT in reasons and self._is_timed_out:
            limit = self._lifecycle.config.request_timeout
            return ApiError(504, f"the request took longer than {limit:g} s, the limit of this server")
        if FinishReason.ABORT in reasons:
            return ApiError(503, self._lifecycle.cut_reason)
        return None

    def _new_pieces(self, output: RequestOutput) -> Iterator[Piece]:
        for choice in output.outputs:
            place = self._places[output.request_id] + choice.index
            if place in self._ended:
                continue
            is_first = place not in self._begun
            self._begun.add(place)
            if choice.finish_reason is not None:
                self._ended.add(place)
            piece = Piece(
                place=place,
                request=self._request(output),
                text=choice.delta_text,
                token_ids=choice.delta_token_ids,
                logprobs=choice.delta_logprobs,
                token_texts=choice.delta_token_texts,
                is_first=is_first,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_logprobs=output.prompt_logprobs if is_first else None,
            )
            if is_first or piece.has_text_or_end or (self.shows_tokens and piece.token_ids):
                yield piece

    def _whole_piece(self, output: RequestOutput, choice: CompletionOutput) -> Piece:
        return Piece(
            place=self._places[output.request_id] + choice.index,
            request=self._request(output),
            text=choice.text,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            token_texts=choice.token_texts,
            is_first=True,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_logprobs=output.prompt_logprobs,
        )

    def _request(self, output: RequestOutput) -> Request:
        return self.requests[self._places[output.request_id] // self.num_choices]

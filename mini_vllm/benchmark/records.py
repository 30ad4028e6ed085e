"""What a run leaves behind: each request as its user saw it, each step's times, memory held and wasted.

Where it stands: the runner and the load generator write these; the reports read them.

In vLLM: `RequestFuncOutput` in `vllm/benchmarks/lib/endpoint_request_func.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from mini_vllm.benchmark.step_times import StepTimes
from mini_vllm.errors import MiniVLLMError


class BenchmarkError(MiniVLLMError):
    """A run that measures nothing: requests failed, or answers differ that must be equal."""


@dataclass(frozen=True)
class RequestRecord:
    """One request as its user saw it; times in seconds.

    Args:
        arrival: when it was added.
        token_times: when each output token was handed over.
        token_ids: what came back.
        num_prompt_tokens, num_cached_tokens: of its prompt, and how many of them the prefix cache saved.
    """

    arrival: float
    token_times: tuple[float, ...]
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def end_to_end(self) -> float:
        return self.token_times[-1] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Between one token and the next: one fewer than there are tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def time_per_output_token(self) -> float:
        """The mean gap: the time after the first token over the number of tokens after it; 0 if there is none."""
        later = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / later if later else 0.0


@dataclass(frozen=True)
class RunRecord:
    """One run of a workload.

    Args:
        seconds: from the first request's arrival to the last token.
        requests: in the workload's order.
        steps: every step of the engine.
        held_bytes, wasted_bytes: one entry a step: memory of the blocks in use, and of those slots in them that hold
            no token.
    """

    seconds: float
    requests: tuple[RequestRecord, ...]
    steps: tuple[StepTimes, ...]
    held_bytes: tuple[int, ...]
    wasted_bytes: tuple[int, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_cached_tokens(self) -> int:
        return sum(request.num_cached_tokens for request in self.requests)

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def wasted_share(self) -> float:
        """Of the memory held, over all steps; 0 where nothing is held."""
        held = sum(self.held_bytes)
        return sum(self.wasted_bytes) / held if held else 0.0

    @property
    def answers(self) -> list[tuple[int, ...]]:
        """The tokens of every request."""
        return [request.token_ids for request in self.requests]

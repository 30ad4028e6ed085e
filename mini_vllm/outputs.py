"""What a user gets back: `RequestOutput` and its parts.

Where it stands: the output processor makes one for every request that moved in a step; `LLMEngine.step` returns them.

Deltas and totals: `output.text` and `output.token_ids` are what the *last step* added to the first choice, ready to
print; `output.outputs[i]` is choice i, with the same deltas and, read only when asked for, everything so far.

In vLLM: `vllm/outputs.py`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

# The error of a request whose own masks exclude every token; all other errors are not the user's.
NO_TOKEN_LEFT = (
    "allowed tokens, structured_outputs, bad words, min_tokens and logit_bias together leave no token to choose"
)
GRAMMAR_FAILED = "structured_outputs: the form cannot be followed any further"


class FinishReason(str, enum.Enum):
    """Why a generation ended. Compares equal to its plain string."""

    STOP = "stop"  # an end of sequence, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, taken before temperature and penalties.

    Args:
        token_id: the token that stands there.
        logprob: its log-probability; -inf where the model excludes it.
        top_token_ids, top_logprobs: the most likely tokens, best first; as many as were asked for.
    """

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds on the engine's clock (monotonic; only differences mean something).

    Args:
        arrival_time: when it was added.
        first_scheduled_time: when it was first admitted; None if it never was.
        first_token_time: when its first token was there.
        last_token_time: when its newest token was there.
        finished_time: when its final output was made.
        num_preemptions: how often one of its sequences lost its blocks and was computed again.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n answers of a request.

    Args:
        index: which of the n.
        delta_text, delta_token_ids: what the last step added.
        delta_logprobs, delta_token_texts: one entry a token of `delta_token_ids`; None unless logprobs were asked for.
        finish_reason: None while it goes on.
        stop_reason: the stop id or stop string that ended it; None for an end of sequence and all else.
    """

    index: int
    delta_text: str
    delta_token_ids: list[int]
    delta_logprobs: list[TokenLogprobs] | None
    delta_token_texts: list[str] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    _read_text: Callable[[], str] = field(repr=False, compare=False)
    _read_token_ids: Callable[[], list[int]] = field(repr=False, compare=False)
    _read_logprobs: Callable[[], list[TokenLogprobs] | None] = field(repr=False, compare=False)
    _read_token_texts: Callable[[], list[str] | None] = field(repr=False, compare=False)
    _read_token_times: Callable[[], list[float]] = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        """All text so far. Built when read."""
        return self._read_text()

    @property
    def token_ids(self) -> list[int]:
        """All output token ids so far, the ending one included. Built when read."""
        return self._read_token_ids()

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One entry an output token, None unless asked for. Built when read."""
        return self._read_logprobs()

    @property
    def token_times(self) -> list[float]:
        """When each output token was there, in seconds on the engine's clock. Built when read."""
        return self._read_token_times()

    @property
    def inter_token_times(self) -> list[float]:
        """Seconds between each output token and the one before it: one entry fewer than there are tokens."""
        times = self._read_token_times()
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def token_texts(self) -> list[str] | None:
        """The text that each output token adds, '' while a character is incomplete; None unless logprobs were asked
        for.

        They join to `text`, and go on past it where a stop string has cut it.
        """
        return self._read_token_texts()


@dataclass(frozen=True)
class RequestOutput:
    """The state of one request after a step.

    Args:
        request_id: as returned by `add_request`.
        prompt: the text given, None for token ids.
        prompt_token_ids: the prompt as the model sees it.
        outputs: the choices that exist so far, n of them once the prompt is computed.
        finished: True in the final output, which every accepted request gets exactly once.
        prompt_logprobs: one entry a prompt token, the first one None; None unless asked for.
        num_cached_tokens: prompt tokens that the prefix cache saved.
        metrics: times and counts.
        error: why, when a choice ended with finish reason `error`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None
    num_cached_tokens: int
    metrics: RequestMetrics
    error: str | None = None

    @property
    def text(self) -> str:
        """The text that the last step added to choice 0."""
        return self.outputs[0].delta_text if self.outputs else ""

    @property
    def token_ids(self) -> list[int]:
        """The token ids that the last step added to choice 0."""
        return self.outputs[0].delta_token_ids if self.outputs else []

"""What a user gets back: `RequestOutput` and its parts.

Where it stands: the output processor makes one for every request that moved in a step; `LLMEngine.step` returns them.

Deltas and totals: `output.text` and `output.token_ids` are what the *last step* added to the first choice, ready to
print; `output.outputs[i]` is choice i, with the same deltas and everything so far. Texts and lists are made when they
are read: a step makes an output for each of its requests, and most of these are looked at once or never. For the same
reason outputs are not frozen, which would make them five times as slow to make; nobody changes them all the same.

In vLLM: `vllm/outputs.py`.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import Protocol

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


@dataclass(slots=True)
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


class Answer(Protocol):
    """One answer while it grows. What is known of it never changes, so a stretch of it can be read at any later time.

    A stretch goes from one count of output tokens to another. When the answer has ended it is one longer than its
    tokens: in the place behind the last one stands the text that was held back until it was clear that none follows.
    """

    def text(self, start: int, end: int) -> str: ...

    def token_ids(self, start: int, end: int) -> list[int]: ...

    def logprobs(self, start: int, end: int) -> list[TokenLogprobs] | None: ...

    def token_texts(self, start: int, end: int) -> list[str] | None: ...

    def token_times(self, start: int, end: int) -> list[float]: ...


@dataclass(slots=True, repr=False, eq=False)
class CompletionOutput:
    """One of the n answers of a request. All that it says is read from the answer when it is asked for.

    Args:
        index: which of the n.
        finish_reason: None while it goes on.
        stop_reason: the stop id or stop string that ended it; None for an end of sequence and all else.
        answer: as it grows, in this output and in those after it.
        start, end: the stretch of the answer that the last step added.
    """

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    answer: Answer
    start: int
    end: int

    @property
    def delta_text(self) -> str:
        """The text that the last step added."""
        return self.answer.text(self.start, self.end)

    @property
    def delta_token_ids(self) -> list[int]:
        """The token ids that the last step added."""
        return self.answer.token_ids(self.start, self.end)

    @property
    def delta_logprobs(self) -> list[TokenLogprobs] | None:
        """One entry a token of `delta_token_ids`, None unless asked for."""
        return self.answer.logprobs(self.start, self.end)

    @property
    def delta_token_texts(self) -> list[str] | None:
        """One entry a token of `delta_token_ids`, None unless logprobs were asked for.

        An abort or an error comes without a token. What was held back until then belongs to the last token, which has
        been handed out: it is in `delta_text` and in the last entry of `token_texts`, and in no entry here.
        """
        return self.answer.token_texts(self.start, self.end)

    @property
    def text(self) -> str:
        """All text so far."""
        return self.answer.text(0, self.end)

    @property
    def token_ids(self) -> list[int]:
        """All output token ids so far, the ending one included."""
        return self.answer.token_ids(0, self.end)

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One entry an output token, None unless asked for."""
        return self.answer.logprobs(0, self.end)

    @property
    def token_times(self) -> list[float]:
        """When each output token was there, in seconds on the engine's clock."""
        return self.answer.token_times(0, self.end)

    @property
    def inter_token_times(self) -> list[float]:
        """Seconds between each output token and the one before it: one entry fewer than there are tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def token_texts(self) -> list[str] | None:
        """The text that each output token adds, '' while a character is incomplete; None unless logprobs were asked
        for.

        They join to `text`, and go on past it where a stop string has cut it.
        """
        return self.answer.token_texts(0, self.end)

    def __repr__(self) -> str:
        shown = ("index", "delta_text", "delta_token_ids", "finish_reason", "stop_reason")
        return f"CompletionOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


@dataclass(slots=True)
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

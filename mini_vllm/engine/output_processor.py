"""The output processor: from new tokens to what the user reads.

Where it stands: after `scheduler.commit` in every step. It detokenises, looks for stop strings, and makes one
`RequestOutput` for each request that moved.

What always holds: streamed texts join to exactly the final text; a request gets one output with `finished`, and is
forgotten with it.

In vLLM: `vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from mini_vllm.engine.sequence import Sequence, SequenceGroup
from mini_vllm.engine.sequence_change import SequenceChange
from mini_vllm.engine.stop_strings import StopStringMatcher
from mini_vllm.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from mini_vllm.tokenizer.detokenizer import IncrementalDetokenizer
from mini_vllm.tokenizer.tokenizer import Tokenizer

_Item = TypeVar("_Item")


class SequenceText:
    """The text of one sequence, as far as it is known and may be shown."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        request = sequence.group.request
        self._params = request.params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, request.prompt_token_ids, skip_special_tokens=self._params.skip_special_tokens
        )
        self._matcher = StopStringMatcher(self._params.stop or (), include_stop=self._params.include_stop_str_in_output)
        self._may_stop = True
        self.shown: list[str] = []
        self.token_texts: list[str] = []  # kept only where logprobs are asked for
        self.token_times: list[float] = []  # seconds, one an output token
        self.num_reported_tokens = 0
        self.num_reported_pieces = 0

    def push(self, token_id: int, num_output_tokens: int, *, ends_here: bool) -> str | None:
        """Take one more token.

        Args:
            num_output_tokens: this one included.
            ends_here: it is an end of sequence or a stop id, which has no text unless it is to be included.

        Returns:
            The stop string that it completes, if any.
        """
        text = "" if ends_here and not self._params.include_stop_str_in_output else self._detokenizer.push(token_id)
        if self._params.logprobs is not None:
            self.token_texts.append(text)
        self._may_stop = num_output_tokens > self._params.min_tokens
        self.shown.append(self._matcher.push(text, may_stop=self._may_stop))
        return self._matcher.matched

    def finish(self) -> str | None:
        """No token will follow: show what was held back. Returns a stop string that completes only now, if any."""
        text = self._detokenizer.flush()
        if self.token_texts:
            self.token_texts[-1] += text
        self.shown.append(self._matcher.push(text, may_stop=self._may_stop))
        if self._matcher.matched is None:
            self.shown.append(self._matcher.flush())
        return self._matcher.matched


@dataclass(eq=False)
class _RequestState:
    group: SequenceGroup
    texts: list[SequenceText] = field(default_factory=list)
    first_token_time: float | None = None
    last_token_time: float | None = None
    error: str | None = None


class OutputProcessor:
    """Holds the text state of every live request.

    Args:
        tokenizer: the model's.
        clock: seconds, monotonic.
    """

    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float]) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, _RequestState] = {}

    def add(self, group: SequenceGroup) -> None:
        self._requests[group.request.request_id] = _RequestState(group)

    def group(self, request_id: str) -> SequenceGroup | None:
        """The live request of that id, None if there is none."""
        state = self._requests.get(request_id)
        return None if state is None else state.group

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def process(self, changes: Iterable[SequenceChange]) -> tuple[list[RequestOutput], list[Sequence]]:
        """Turn a step's changes into outputs.

        Returns:
            One output a request that moved, and the sequences that ended, for `scheduler.finish`.
        """
        now = self._clock()
        moved: dict[str, _RequestState] = {}
        stopped: list[Sequence] = []
        for change in changes:
            sequence = change.sequence
            state = self._requests[sequence.group.request.request_id]
            moved[sequence.group.request.request_id] = state
            if change.num_new_tokens:
                state.last_token_time = now
                state.first_token_time = now if state.first_token_time is None else state.first_token_time
            if change.error is not None:
                state.error = change.error
            self._update_text(state, change, now)
            if sequence.finish_reason is not None:
                stopped.append(sequence)
        return [self._output(state, now) for state in moved.values()], stopped

    def abort(self, group: SequenceGroup) -> RequestOutput:
        """The final output of a request whose sequences have just been aborted."""
        state = self._requests[group.request.request_id]
        for sequence in group.sequences:
            if sequence.finish_reason is FinishReason.ABORT:
                self._text_of(state, sequence).finish()
        return self._output(state, self._clock())

    def _update_text(self, state: _RequestState, change: SequenceChange, now: float) -> None:
        sequence = change.sequence
        text = self._text_of(state, sequence)
        text.token_times.extend([now] * change.num_new_tokens)
        # A grammar that is finished also ends a sequence, with a token that is text.
        ends = sequence.group.request.stop_token_ids
        ended_by_id = sequence.finish_reason is FinishReason.STOP and sequence.token_ids[-1] in ends
        stop = None
        for offset in range(-change.num_new_tokens, 0):
            ends_here = ended_by_id and offset == -1
            num_output_tokens = sequence.num_output_tokens + offset + 1
            stop = text.push(sequence.token_ids[offset], num_output_tokens, ends_here=ends_here)
        if sequence.finish_reason is not None and stop is None:
            stop = text.finish()
        if stop is not None:
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop

    def _text_of(self, state: _RequestState, sequence: Sequence) -> SequenceText:
        while len(state.texts) <= sequence.index:
            state.texts.append(SequenceText(state.group.sequences[len(state.texts)], self._tokenizer))
        return state.texts[sequence.index]

    def _output(self, state: _RequestState, now: float) -> RequestOutput:
        group, request = state.group, state.group.request
        choices = [_choice(sequence, self._text_of(state, sequence)) for sequence in group.sequences]
        finished = group.is_forked and all(sequence.finish_reason is not None for sequence in group.sequences)
        if finished:
            del self._requests[request.request_id]
        metrics = RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=group.first_scheduled_time,
            first_token_time=state.first_token_time,
            last_token_time=state.last_token_time,
            finished_time=now if finished else None,
            num_preemptions=group.num_preemptions,
        )
        wants_prompt_logprobs = request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=choices,
            finished=finished,
            prompt_logprobs=group.prompt_logprobs if wants_prompt_logprobs else None,
            num_cached_tokens=group.num_cached_tokens or 0,
            metrics=metrics,
            error=state.error,
        )


def _choice(sequence: Sequence, text: SequenceText) -> CompletionOutput:
    """The deltas since the last output, and readers for everything up to now."""
    num_tokens, num_pieces = sequence.num_output_tokens, len(text.shown)
    wants_logprobs = sequence.group.request.params.logprobs is not None
    new_tokens = slice(text.num_reported_tokens, num_tokens)
    first_new = sequence.num_prompt_tokens + text.num_reported_tokens
    choice = CompletionOutput(
        index=sequence.index,
        delta_text="".join(text.shown[text.num_reported_pieces :]),
        delta_token_ids=sequence.token_ids[first_new:],
        delta_logprobs=sequence.logprobs[new_tokens] if wants_logprobs else None,
        delta_token_texts=text.token_texts[new_tokens] if wants_logprobs else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        _read_text=partial(_joined, text.shown, num_pieces),
        _read_token_ids=partial(_tokens, sequence, num_tokens),
        _read_logprobs=partial(_first, sequence.logprobs if wants_logprobs else None, num_tokens),
        _read_token_times=partial(_times, text.token_times, num_tokens),
        _read_token_texts=partial(_first, text.token_texts if wants_logprobs else None, num_tokens),
    )
    text.num_reported_tokens, text.num_reported_pieces = num_tokens, num_pieces
    return choice


def _joined(pieces: list[str], count: int) -> str:
    return "".join(pieces[:count])


def _tokens(sequence: Sequence, count: int) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens : sequence.num_prompt_tokens + count]


def _times(times: list[float], count: int) -> list[float]:
    return times[:count]


def _first(items: list[_Item] | None, count: int) -> list[_Item] | None:
    return None if items is None else items[:count]

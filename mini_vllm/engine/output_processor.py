"""The output processor: from new tokens to what the user reads.

Where it stands: after `scheduler.commit` in every step. It looks for stop strings, and makes one `RequestOutput` for
each request that moved; of a request with `only_final` none but the last. Text is made by whoever reads it
(`sequence_text.py`).

What always holds: streamed texts join to exactly the final text; a request gets one output with `finished`, and is
forgotten with it.

In vLLM: `vllm/v1/engine/output_processor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mini_vllm.engine.sequence import Sequence, SequenceGroup
from mini_vllm.engine.sequence_change import SequenceChange
from mini_vllm.engine.sequence_text import SequenceText
from mini_vllm.outputs import FinishReason, RequestMetrics, RequestOutput
from mini_vllm.tokenizer.tokenizer import Tokenizer


@dataclass(eq=False)
class _RequestState:
    group: SequenceGroup
    only_final: bool
    texts: list[SequenceText] = field(default_factory=list)
    first_token_time: float | None = None
    last_token_time: float | None = None
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.group.is_forked and None not in [sequence.finish_reason for sequence in self.group.sequences]


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

    def add(self, group: SequenceGroup, *, only_final: bool = False) -> None:
        self._requests[group.request.request_id] = _RequestState(group, only_final)

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
            One output a request that moved, unless only its final one is wanted; and the sequences that ended, for
            `scheduler.finish`.
        """
        now = self._clock()
        moved: dict[str, _RequestState] = {}
        stopped: list[Sequence] = []
        for change in changes:
            sequence = change.sequence
            request_id = sequence.group.request.request_id
            state = moved[request_id] = self._requests[request_id]
            if change.num_new_tokens:
                state.last_token_time = now
                state.first_token_time = now if state.first_token_time is None else state.first_token_time
            if change.error is not None:
                state.error = change.error
            self._update_text(state, change, now)
            if sequence.finish_reason is not None:
                stopped.append(sequence)
        wanted = [state for state in moved.values() if not state.only_final or state.is_finished]
        return [self._output(state, now) for state in wanted], stopped

    def abort(self, group: SequenceGroup) -> RequestOutput:
        """The final output of a request whose sequences have just been aborted."""
        return self._output(self._requests[group.request.request_id], self._clock())

    def _update_text(self, state: _RequestState, change: SequenceChange, now: float) -> None:
        sequence = change.sequence
        text = self._text_of(state, sequence)
        text.times.extend([now] * change.num_new_tokens)
        if sequence.group.request.params.stop:
            stop = text.find_stop()
            if stop is not None:
                sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop

    def _text_of(self, state: _RequestState, sequence: Sequence) -> SequenceText:
        while len(state.texts) <= sequence.index:
            state.texts.append(SequenceText(state.group.sequences[len(state.texts)], self._tokenizer))
        return state.texts[sequence.index]

    def _output(self, state: _RequestState, now: float) -> RequestOutput:
        group, request = state.group, state.group.request
        choices = [self._text_of(state, sequence).new_output() for sequence in group.sequences]
        finished = state.is_finished
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

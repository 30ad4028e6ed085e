"""What a drawn token does to its sequence.

Where it stands: the scheduler's `commit` calls `take_token` for every draw; the output processor reads the changes.

    token -> the grammar moves on -> the sequence's row and its ids -> is it the end?
             or it is an error                                         a stop id, the form's end, or max_tokens;
                                                                       stop strings are the output processor's

In vLLM: `check_stop` in `vllm/v1/core/sched/utils.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from mini_vllm.engine.scheduled_batch import SampledToken
from mini_vllm.engine.sequence import Sequence
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.outputs import GRAMMAR_FAILED, FinishReason


class SequenceChange(NamedTuple):
    """What a step did to one sequence.

    Args:
        sequence: its `finish_reason` is set if a token, a length or an error ended it.
        num_new_tokens: how many of its last tokens are new.
        error: the reason behind finish reason `error`.
    """

    sequence: Sequence
    num_new_tokens: int
    error: str | None = None


def take_token(sequence: Sequence, token: SampledToken, table: SequenceTable) -> SequenceChange:
    """Append a token that was drawn, and see whether the sequence ends with it.

    Args:
        sequence: it runs.
        token: or an error in its place, which ends the sequence.
        table: where the sequence has its row.
    """
    error = _failure(sequence, token)
    if error is not None:
        sequence.finish_reason = FinishReason.ERROR
        return SequenceChange(sequence, 0, error)
    table.append_token(sequence, token.token_id)
    sequence.token_ids.append(token.token_id)
    if token.logprobs is not None:
        sequence.logprobs.append(token.logprobs)
    _check_stop(sequence, token.token_id)
    return SequenceChange(sequence, 1)


def _failure(sequence: Sequence, token: SampledToken) -> str | None:
    """Why the draw gave nothing that the sequence can go on with. If there is a grammar, the token moves it on."""
    grammar = sequence.grammar
    if grammar is None:
        return token.error
    if token.error is None:
        grammar.advance(token.token_id)
    return token.error if grammar.error is None else f"{GRAMMAR_FAILED}: {grammar.error}"


def _check_stop(sequence: Sequence, token_id: int) -> None:
    """End the sequence if its newest token is an end or its last one. Stop strings are the output processor's."""
    request, num_output_tokens = sequence.group.request, sequence.num_output_tokens
    if token_id in request.stop_token_ids and num_output_tokens > request.params.min_tokens:
        sequence.finish_reason = FinishReason.STOP
        sequence.stop_reason = request.stop_token_reasons.get(token_id)
    elif sequence.grammar is not None and sequence.grammar.is_finished:
        sequence.finish_reason = FinishReason.STOP  # also before min_tokens: there is nothing left to say
    elif num_output_tokens >= request.max_tokens:
        sequence.finish_reason = FinishReason.LENGTH

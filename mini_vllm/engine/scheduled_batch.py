"""`ScheduledBatch` and `ModelOutput`: what the scheduler asks of the worker for one step, and what comes back.

Where it stands: the border between engine and worker. Both are plain values of numbers (rows, positions, counts), so
that they can be sent to another process; everything else the worker needs stands in the `SequenceTable`, by row. What
there is one of for each sequence is a named tuple, which is made in a quarter of a frozen dataclass's time.

Worked example, a step with three sequences (rows 4, 0 and 7)::

    sequences   (row 4, start  9, 1 token)     decode: computes position 9
                (row 0, start 21, 1 token)     decode
                (row 7, start  0, 5 tokens)    prefill of a whole prompt, n = 2
    draws       from the last token of row 4, of row 0, and two from the last token of row 7 (samples 0 and 1)
    flat batch  [t9 | t21 | t0 t1 t2 t3 t4]    7 tokens; logits are computed for 3 of them

In vLLM: `SchedulerOutput` in `vllm/v1/core/sched/output.py` and `ModelRunnerOutput` in `vllm/v1/outputs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.outputs import TokenLogprobs


class ScheduledSequence(NamedTuple):
    """One sequence that runs in this step.

    Args:
        row: its row in the SequenceTable.
        start: the first position that is computed.
        num_new_tokens: how many positions are computed, from `start` on.
        is_prefill: whether prompt (or, after a preemption, known) tokens are computed, rather than one decode token.
    """

    row: int
    start: int
    num_new_tokens: int
    is_prefill: bool

    @property
    def end(self) -> int:
        """One past the last position that is computed."""
        return self.start + self.num_new_tokens


class Draw(NamedTuple):
    """One token to sample.

    Args:
        sequence: index into `ScheduledBatch.sequences`: the logits are those of its last computed token, the sampling
            parameters those of its row.
        sample_index: which of the n siblings the token is for.
        position: where the token will stand; with the seed and sample_index it determines the noise.
        grammar_mask: [ceil(vocabulary / 32)] int32, bit t % 32 of word t // 32 set where token t may come; None if all
            may.
    """

    sequence: int
    sample_index: int
    position: int
    grammar_mask: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobsSpan:
    """Logprobs of known prompt tokens.

    The logits at position p speak about the token at p + 1, so the logits of positions [start, end) give the entries of
    the prompt tokens [start + 1, end + 1).

    Args:
        sequence: index into `ScheduledBatch.sequences`.
        start, end: positions whose logits are needed, all of them computed in this step.
        num_logprobs: alternatives a position.
    """

    sequence: int
    start: int
    end: int
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The work of one step. `block_copies` are made first, and once, however often the rest is tried.

    Draws stand in the order of their sequences.
    """

    sequences: list[ScheduledSequence]
    draws: list[Draw]
    prompt_logprobs: list[PromptLogprobsSpan]
    block_copies: list[BlockCopy]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_new_tokens for sequence in self.sequences)

    @property
    def is_empty(self) -> bool:
        return not self.sequences


class SampledToken(NamedTuple):
    """What one draw gave.

    Args:
        token_id: meaningless if there is an error.
        logprobs: if the request asked for them.
        error: why no token could be drawn (logits that are not a number, masks that leave no token), else None.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The results of one step.

    Args:
        tokens: one a draw, in the order of `ScheduledBatch.draws`.
        prompt_logprobs: one list a span, in the order of `ScheduledBatch.prompt_logprobs`.
        errors: sequences (by index) that failed as a whole, and why; their draws carry the error as well.
    """

    tokens: list[SampledToken]
    prompt_logprobs: list[list[TokenLogprobs]]
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One sequence of a batch as a batch of its own.

    Args:
        batch: the part.
        draws, spans: where its draws and prompt-logprob spans stand in the whole batch.
    """

    batch: ScheduledBatch
    draws: list[int]
    spans: list[int]


def split_batch(batch: ScheduledBatch) -> list[BatchPart]:
    """Cut a batch into its sequences, to find out which one makes it fail.

    The parts have no block copies. Those of the batch have been made, and made again they would undo what a part before
    has written.
    """
    parts = []
    for index, sequence in enumerate(batch.sequences):
        draws = [place for place, draw in enumerate(batch.draws) if draw.sequence == index]
        spans = [place for place, span in enumerate(batch.prompt_logprobs) if span.sequence == index]
        part = ScheduledBatch(
            sequences=[sequence],
            draws=[batch.draws[place]._replace(sequence=0) for place in draws],
            prompt_logprobs=[replace(batch.prompt_logprobs[place], sequence=0) for place in spans],
            block_copies=[],
        )
        parts.append(BatchPart(part, draws, spans))
    return parts

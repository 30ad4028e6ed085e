"""The batch in the making: which sequences, how many of their tokens, and what is drawn from them.

Where it stands: the scheduler makes one a step, fills it while the token budget lasts, and hands out the
`ScheduledBatch`.

In vLLM: the dictionaries that `schedule` fills in `vllm/v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.engine.scheduled_batch import Draw, PromptLogprobsSpan, ScheduledBatch, ScheduledSequence
from mini_vllm.engine.sequence import Sequence


@dataclass
class BatchBuilder:
    """See the module.

    Args:
        budget: tokens that may still be computed in this step.
        num_preempted: sequences that had to make room in this step.
        sequences, draws, prompt_logprobs, block_copies: of the batch.
    """

    budget: int
    num_preempted: int = 0
    sequences: list[ScheduledSequence] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobsSpan] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)

    def add(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Compute `num_new_tokens` more tokens of `sequence`, and draw if that reaches the last one it knows."""
        start, index = sequence.num_computed_tokens, len(self.sequences)
        end = start + num_new_tokens
        self.sequences.append(ScheduledSequence(sequence.row, start, num_new_tokens, not sequence.is_decoding))
        self.budget -= num_new_tokens
        group, params = sequence.group, sequence.group.request.params
        if end == sequence.num_tokens and group.request.max_tokens > 0:
            # Before the fork, the siblings of n all draw from the last prompt token.
            siblings = (sequence.index,) if group.is_forked else range(params.n)
            mask = None if sequence.grammar is None else sequence.grammar.mask()
            self.draws.extend(Draw(index, sample_index, end, mask) for sample_index in siblings)
        if params.prompt_logprobs is not None and group.needs_prompt_logprobs:
            # Entry 0 is None, entry p + 1 comes from the logits at p; after a preemption those already there are
            # skipped.
            first = max(start, len(group.prompt_logprobs) - 1)
            last = min(end, sequence.num_prompt_tokens - 1)
            if first < last:
                self.prompt_logprobs.append(PromptLogprobsSpan(index, first, last, params.prompt_logprobs))

    def build(self) -> ScheduledBatch:
        """The batch as the worker gets it."""
        return ScheduledBatch(self.sequences, self.draws, self.prompt_logprobs, self.block_copies)

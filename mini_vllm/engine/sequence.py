"""`Sequence` and `SequenceGroup`: the state of a request while it is computed.

A sequence has tokens that it *knows* and tokens that are *computed*, that is, whose keys and values stand in the cache.
Scheduling is choosing how many of the difference to compute now; nothing else tells the phases apart:

    known     The cat sat on the mat and      7 tokens, 4 of them prompt
    computed  The cat                         2   -> in the middle of a chunked prefill
              The cat sat on the mat          6   -> decode: one token to compute, which gives the next one
              -                               0   -> waiting, or preempted: all is to be computed again

    WAITING --admit--> RUNNING --stop, length, abort, error--> FINISHED
       ^                  |
       `----- PREEMPTED <-'        (its blocks are gone, its tokens are not)

A request with n > 1 is one group of n sequences. The first one computes the prompt; the others are forked off it when
the first tokens are drawn, and share its blocks until they write.

What always holds: computed <= known; only RUNNING sequences have a row and blocks.

In vLLM: `vllm/v1/request.py` (one sequence a request there) and `vllm/v1/engine/parallel_sampling.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from mini_vllm.cache.block_manager import BlockTable
from mini_vllm.cache.prefix_cache import root_key
from mini_vllm.engine.request import Request
from mini_vllm.outputs import FinishReason, TokenLogprobs


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Sequence:
    """One answer in the making. The scheduler is the only one that changes it."""

    __slots__ = (
        "block_table",
        "finish_reason",
        "grammar",
        "group",
        "index",
        "logprobs",
        "num_computed_tokens",
        "num_prompt_tokens",
        "row",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, group: SequenceGroup, index: int, token_ids: list[int], block_table: BlockTable) -> None:
        self.group = group
        self.index = index
        self.token_ids = token_ids  # prompt and output: the tokens known
        self.num_prompt_tokens = len(group.request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.status = SequenceStatus.WAITING
        self.row = -1  # in the SequenceTable, while RUNNING
        self.block_table = block_table
        self.logprobs: list[TokenLogprobs] = []  # one an output token, if asked for
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        grammar = group.request.grammar  # a sequence is made before its first output token, so it starts anew
        self.grammar = None if grammar is None else grammar.new_state()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """One token to compute, and it is not the prompt's only one."""
        return self.num_computed_tokens > 0 and len(self.token_ids) - self.num_computed_tokens == 1


@dataclass(eq=False)
class SequenceGroup:
    """A request and its n sequences.

    Args:
        request: what was asked for.
        sequences: the first one alone until the prompt is computed, then all n.
        prompt_logprobs: of the prompt positions computed so far, if asked for; entry 0 is None.
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission; None before it.
        num_preemptions: of all its sequences together.
        first_scheduled_time: seconds on the engine's clock; None while it has only waited.
    """

    request: Request
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    first_scheduled_time: float | None = None

    def __post_init__(self) -> None:
        table = BlockTable(root=root_key(self.request.cache_salt))
        if self.request.params.prompt_logprobs is not None:
            self.prompt_logprobs.append(None)  # nothing comes before the first token, so nothing predicts it
        self.sequences.append(Sequence(self, 0, list(self.request.prompt_token_ids), table))

    @property
    def is_forked(self) -> bool:
        """Whether all n sequences are there."""
        return len(self.sequences) == self.request.params.n

    @property
    def is_finished(self) -> bool:
        return self.is_forked and all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)

    @property
    def num_seats(self) -> int:
        """Places among the running that admitting its first sequence takes: the siblings to come need theirs."""
        return 1 if self.is_forked else self.request.params.n

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs were asked for and some are still to be computed."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.request.prompt_token_ids)

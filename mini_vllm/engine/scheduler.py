"""The scheduler: what is computed in the next step.

Where it stands: between the engine and the worker. `schedule` turns the queues into a `ScheduledBatch`; the worker runs
it; `commit` writes the results into the sequences. No torch here, and no text: tokens, blocks and counts only.

**The one rule.** A sequence has tokens known and tokens computed; each step computes some of the difference, under a
token budget. Prefill, a chunk of a prefill, decode, and computing again after a preemption are all this rule:

    budget 8, in this order:
      1. decodes          A 1 token, B 1 token                                    6 left
      2. begun prefills   C goes on: 3 of its tokens were missing                 3 left
      3. admissions       D (20 tokens) gets a row, its blocks, and a first chunk of 3; the rest in later steps

**What always holds**
- Nothing runs without blocks for all tokens it knows. A sequence gets them when it is admitted, and one more whenever
  its decode grows into it.
- When a decode finds no free block, the last sequence in policy order is preempted: its blocks are freed, its tokens
  are kept, it waits for its turn to be computed again. Nobody is admitted in a step that preempted.
- The first sequence in policy order advances in every step, so nobody starves: sooner or later everyone is first.
- A step costs O(running + admitted), however many wait.

Its parts: `policy.py` (the order, and who waits), `running.py` (who runs), `batch_builder.py` (the batch in the
making), `sequence_change.py` (what a drawn token does).

In vLLM: `vllm/v1/core/sched/scheduler.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from mini_vllm.cache.block_manager import BlockManager, BlockTable
from mini_vllm.config import EngineConfig
from mini_vllm.engine import events
from mini_vllm.engine.batch_builder import BatchBuilder
from mini_vllm.engine.policy import WaitingQueue, make_policy
from mini_vllm.engine.running import RunningSequences
from mini_vllm.engine.scheduled_batch import Draw, ModelOutput, SampledToken, ScheduledBatch
from mini_vllm.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from mini_vllm.engine.sequence_change import SequenceChange, take_token
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.outputs import FinishReason


class Scheduler:
    """Queues, rows and blocks of one engine.

    Args:
        config: with its limits settled (`EngineConfig.with_model_limits`).
        block_manager: the pool; for `cache="contiguous"` and `"none"` its blocks are slots of max_model_len tokens.
        listener: called with every event; None if nobody listens.
        clock: seconds, monotonic; the one that requests carry their arrival time of.
    """

    def __init__(
        self,
        config: EngineConfig,
        block_manager: BlockManager,
        listener: events.EventListener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.max_model_len is None or config.max_num_batched_tokens is None:
            raise RuntimeError("the scheduler needs a config whose limits are settled (with_model_limits)")
        self.block_manager = block_manager
        self.listener = listener
        self._clock = clock
        self.table = SequenceTable(config.max_num_seqs, config.max_model_len, block_manager.block_size)
        self._recomputes_all = config.cache == "none"
        self._token_budget = sys.maxsize if self._recomputes_all else config.max_num_batched_tokens
        self._chunks_prefill = config.enable_chunked_prefill
        self._scheduling = config.scheduling
        self._debug_checks = config.debug_checks
        self._policy = make_policy(config.policy)
        self._waiting = WaitingQueue(self._policy)
        self._running = RunningSequences(self._policy, self.table, config.max_num_seqs)
        self._last_step_admitted = False
        self._batch_is_forming = False

    # ---- the life of a request --------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """A new request waits from now on. It must have passed the engine's checks: it fits the pool alone."""
        first = group.sequences[0]
        self._waiting.push(first)
        if self.listener is not None:
            self.listener(events.Queued(group.request.request_id, first.index, first.num_tokens))

    def abort(self, group: SequenceGroup) -> None:
        """End all unfinished sequences of a request, in whatever state they are, and free what they hold."""
        self._end_unborn_siblings(group, FinishReason.ABORT)
        unfinished = [sequence for sequence in group.sequences if sequence.status is not SequenceStatus.FINISHED]
        for sequence in unfinished:
            sequence.finish_reason = FinishReason.ABORT
        self.finish(unfinished)

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """End sequences whose `finish_reason` is set. Their blocks are free for the next `schedule`."""
        for sequence in sequences:
            if sequence.status is SequenceStatus.RUNNING:
                freed = self._release(sequence)
            else:
                freed = ()
            was_queued = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            sequence.status = SequenceStatus.FINISHED
            if was_queued:
                self._waiting.note_finished()
            if self.listener is not None and sequence.finish_reason is not None:
                request_id = sequence.group.request.request_id
                self.listener(events.Finished(request_id, sequence.index, sequence.finish_reason, freed))
        if self._debug_checks:
            self.check()

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self._waiting)

    @property
    def next_waiting(self) -> Sequence | None:
        """The sequence that is admitted next; None if nobody waits."""
        return self._waiting.peek()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The running sequences in policy order."""
        return tuple(self._running)

    @property
    def num_wasted_slots(self) -> int:
        """Token slots that are allocated to running sequences and hold nothing yet (internal waste)."""
        size = self.block_manager.block_size
        return sum(len(s.block_table.blocks) * size - s.num_computed_tokens for s in self._running)

    # ---- schedule ---------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch:
        """Choose the work of the next step. The batch is empty if there is nothing to do."""
        step = BatchBuilder(self._token_budget)
        if not self._running:
            # Static scheduling: the doors open when everyone has left, and nobody who was preempted comes back.
            first = self._waiting.peek()
            self._batch_is_forming = first is None or first.status is not SequenceStatus.PREEMPTED
        if self._chunks_prefill:
            self._schedule_running(step)
            if not step.num_preempted:
                self._admit(step)
        else:
            # Whole prefills and decodes alternate, so that neither starves the other.
            if not (self._last_step_admitted and self._running):
                self._admit(step)
            self._last_step_admitted = bool(step.sequences)
            if not step.sequences:
                self._schedule_running(step)
        batch = step.build()
        if self.listener is not None and batch.sequences:
            self.listener(self._describe(batch))
        return batch

    def _schedule_running(self, step: BatchBuilder) -> None:
        for sequence in self._running.in_turn():
            if step.budget <= 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted a moment ago, to make room for one before it
            if sequence.is_decoding and not self._make_room(sequence, step):
                continue
            num_new = min(sequence.num_uncomputed_tokens, step.budget)
            if num_new > 1 and sequence is self._running.first and not self._recomputes_all:
                # The first one always advances, but its prefill leaves one token to each decode.
                num_decodes = sum(other.is_decoding for other in self._running)
                num_new = min(num_new, max(1, step.budget - num_decodes))
            step.add(sequence, num_new)

    def _make_room(self, sequence: Sequence, step: BatchBuilder) -> bool:
        """Get the block that the decode of `sequence` writes to; False if it had to be preempted itself.

        The victims are later in policy order, so they have not been scheduled in this step yet; and a prefill needs no
        room, since it got all its blocks when it was admitted.
        """
        table, write_from, num_tokens = sequence.block_table, sequence.num_computed_tokens, sequence.num_tokens
        if self.block_manager.has_room(table, num_tokens, write_from):
            return True
        while not self.block_manager.can_append(table, num_tokens, write_from):
            victim = self._running.last
            self._preempt(victim)
            step.num_preempted += 1
            if victim is sequence:
                return False
        num_before = len(table.blocks)
        copy = self.block_manager.append(table, num_tokens, write_from)
        if copy is not None:
            step.block_copies.append(copy)
        self.table.write_blocks(sequence, write_from // self.block_manager.block_size)
        if self.listener is not None:
            new = tuple(table.blocks[num_before:])
            self.listener(events.BlocksAppended(sequence.group.request.request_id, sequence.index, new, copy))
        return True

    def _admit(self, step: BatchBuilder) -> None:
        """Let waiting sequences in while seats, blocks and budget last."""
        while (sequence := self._waiting.peek()) is not None and self._may_join(sequence):
            if step.budget <= 0:
                return
            prefix = self._readable_prefix(sequence)
            num_new = sequence.num_tokens - len(prefix) * self.block_manager.block_size
            if num_new > step.budget:
                if not self._chunks_prefill:
                    return
                num_new = step.budget
            if not self.block_manager.can_allocate(sequence.num_tokens, prefix):
                break
            self._waiting.pop()
            self._start(sequence, prefix)
            step.add(sequence, num_new)
        self._batch_is_forming = False  # stopped for want of requests, seats or blocks, not of budget

    def _may_join(self, sequence: Sequence) -> bool:
        if not self._running.has_seats_for(sequence.group):
            return False
        if self._scheduling == "sequential":
            return not self._running or self._running.first.group is sequence.group
        if self._scheduling == "static":
            return self._batch_is_forming or sequence.status is SequenceStatus.PREEMPTED
        return True

    def _readable_prefix(self, sequence: Sequence) -> list[int]:
        if sequence.group.needs_prompt_logprobs:
            return []  # every prompt position must be computed, or there are no logits to report
        return self.block_manager.cached_prefix(sequence.block_table, sequence.token_ids)

    def _start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a sequence its blocks and its row."""
        group = sequence.group
        self.block_manager.allocate(sequence.block_table, sequence.num_tokens, prefix)
        sequence.num_computed_tokens = len(prefix) * self.block_manager.block_size
        if self.block_manager.prefix_cache is not None:
            self.block_manager.prefix_cache.count_lookup(sequence.num_tokens, sequence.num_computed_tokens)
        if group.num_cached_tokens is None:
            group.num_cached_tokens = sequence.num_computed_tokens
            group.first_scheduled_time = self._clock()
        is_resumed = sequence.status is SequenceStatus.PREEMPTED
        self._running.admit(sequence)
        if self.listener is not None:
            blocks = tuple(sequence.block_table.blocks)
            event = events.Admitted(
                request_id=group.request.request_id,
                index=sequence.index,
                num_tokens=sequence.num_tokens,
                num_cached_tokens=sequence.num_computed_tokens,
                shared_blocks=blocks[: len(prefix)],
                new_blocks=blocks[len(prefix) :],
                is_resumed=is_resumed,
            )
            self.listener(event)

    # ---- preemption -------------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        freed = self._release(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_computed_tokens = 0
        sequence.group.num_preemptions += 1
        self._waiting.push(sequence)
        if self.listener is not None:
            request_id = sequence.group.request.request_id
            self.listener(events.Preempted(request_id, sequence.index, sequence.num_tokens, freed))

    def preempt_all(self) -> None:
        """Take everything back that a step was given and never committed (it was interrupted)."""
        for sequence in reversed(self.running):
            self._preempt(sequence)

    def _release(self, sequence: Sequence) -> tuple[int, ...]:
        """Take row, seats and blocks of a running sequence back. Returns the blocks it held, if anyone listens."""
        freed = tuple(sequence.block_table.blocks) if self.listener is not None else ()
        self._running.release(sequence)
        self.block_manager.free(sequence.block_table)
        return freed

    # ---- commit -----------------------------------------------------------------------------------------------

    def commit(self, batch: ScheduledBatch, output: ModelOutput) -> list[SequenceChange]:
        """Write a step's results into the sequences.

        Returns:
            The sequences that moved. Those that ended have a `finish_reason`, but keep their blocks until `finish`.
        """
        sequences = [self._running.in_row(scheduled.row) for scheduled in batch.sequences]
        for sequence, scheduled in zip(sequences, batch.sequences, strict=True):
            if not self._recomputes_all:
                sequence.num_computed_tokens = scheduled.start + scheduled.num_new_tokens
        for span, entries in zip(batch.prompt_logprobs, output.prompt_logprobs, strict=True):
            sequences[span.sequence].group.prompt_logprobs.extend(entries)
        changes = [
            self._commit_draw(sequences[draw.sequence], draw, token)
            for draw, token in zip(batch.draws, output.tokens, strict=True)
        ]
        changes += self._commit_without_draw(batch, sequences, output.errors)
        for sequence in sequences:
            if sequence.finish_reason is FinishReason.ERROR:
                self.block_manager.unpublish(sequence.block_table)
            else:
                self.block_manager.publish(sequence.block_table, sequence.token_ids, sequence.num_computed_tokens)
        return changes

    def _commit_draw(self, parent: Sequence, draw: Draw, token: SampledToken) -> SequenceChange:
        sequence = parent if draw.sample_index == parent.index else self._fork(parent, draw.sample_index)
        return take_token(sequence, token, self.table)

    def _commit_without_draw(
        self, batch: ScheduledBatch, sequences: list[Sequence], errors: dict[int, str]
    ) -> list[SequenceChange]:
        """What happens to sequences that drew nothing: a failed chunk, or a prompt that wanted no tokens."""
        drew = {draw.sequence for draw in batch.draws}
        changes = []
        for index, sequence in enumerate(sequences):
            if index in drew:
                continue
            if index in errors:
                sequence.finish_reason = FinishReason.ERROR
                self._end_unborn_siblings(sequence.group, FinishReason.ERROR)
                changes.append(SequenceChange(sequence, 0, errors[index]))
            elif sequence.group.request.max_tokens == 0 and batch.sequences[index].end == sequence.num_tokens:
                sequence.finish_reason = FinishReason.LENGTH
                self._end_unborn_siblings(sequence.group, FinishReason.LENGTH)
                changes.append(SequenceChange(sequence, 0))
        return changes

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """Sibling `index`, at the moment when the prompt is computed and the first tokens are drawn."""
        prompt = parent.token_ids[: parent.num_prompt_tokens]
        sibling = Sequence(parent.group, index, prompt, self.block_manager.fork(parent.block_table))
        sibling.num_computed_tokens = parent.num_computed_tokens
        parent.group.sequences.append(sibling)
        self._running.seat(sibling)  # its seat was counted when the first one was admitted
        if self.listener is not None:
            blocks = tuple(sibling.block_table.blocks)
            self.listener(events.Forked(parent.group.request.request_id, index, blocks))
        return sibling

    def _end_unborn_siblings(self, group: SequenceGroup, reason: FinishReason) -> None:
        """A group that ends before its fork still has n outputs."""
        first = group.sequences[0]
        for index in range(len(group.sequences), group.request.params.n):
            sibling = Sequence(group, index, list(group.request.prompt_token_ids), BlockTable(first.block_table.root))
            sibling.status, sibling.finish_reason = SequenceStatus.FINISHED, reason
            if first.status is SequenceStatus.RUNNING:
                self._running.give_up_seat()
            group.sequences.append(sibling)

    # ---- figures and checks -----------------------------------------------------------------------------------

    def _describe(self, batch: ScheduledBatch) -> events.StepScheduled:
        entries = []
        for scheduled in batch.sequences:
            sequence = self._running.in_row(scheduled.row)
            entries.append(
                events.SequenceScheduled(
                    sequence.group.request.request_id,
                    sequence.index,
                    scheduled.start,
                    scheduled.num_new_tokens,
                    scheduled.is_prefill,
                )
            )
        return events.StepScheduled(tuple(entries), self.num_waiting, self.num_running, self.block_manager.stats)

    def check(self) -> None:
        """Raise RuntimeError if an invariant of queues, seats or blocks is broken (debug mode)."""
        self.block_manager.check(sequence.block_table for sequence in self._running)
        self._running.check()
        for sequence in self._running:
            room = len(sequence.block_table.blocks) * self.block_manager.block_size
            if not sequence.num_computed_tokens <= sequence.num_tokens or room < sequence.num_computed_tokens:
                raise RuntimeError(f"scheduler: {sequence.num_computed_tokens} tokens computed in {room} slots")

"""The observer: a listener that knows, after each step, who holds which block and what stands in it.

Where it stands: attached to the engine by `mini-vllm explain`. The narrator asks it after every step for the events of
that step and for the state of the queues and of the pool.

What always holds: a block's `token_ids` are the tokens whose keys and values are in it, in the order of its slots, also
when the block is cached but free.

In vLLM: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mini_vllm.engine import events
from mini_vllm.engine.events import sequence_name
from mini_vllm.engine.scheduler import Scheduler
from mini_vllm.engine.sequence import Sequence


@dataclass(frozen=True)
class TableView:
    """The block table of a running sequence.

    Args:
        name: of the sequence.
        blocks: the numbers in the table.
        num_computed: tokens whose keys and values are in the pool.
        num_known: tokens of prompt and output so far.
    """

    name: str
    blocks: tuple[int, ...]
    num_computed: int
    num_known: int


@dataclass(frozen=True)
class BlockView:
    """One block of the pool.

    Args:
        number: of the block.
        owners: names of the sequences whose tables have it; several if it is shared.
        token_ids: the tokens whose keys and values stand in it.
        num_new: how many of them, the last ones, the step has just written.
        is_cached: the prefix cache can find its content.
    """

    number: int
    owners: tuple[str, ...]
    token_ids: tuple[int, ...]
    num_new: int
    is_cached: bool


@dataclass
class Usage:
    """Token slots, summed over all steps, and how many of them held something: as they are (a shared block counts
    once), and as they would be with max_model_len of them set aside for each sequence."""

    slots: int = 0
    filled: int = 0
    contiguous_slots: int = 0
    contiguous_filled: int = 0
    most_blocks: int = 0
    most_running: int = 0


@dataclass
class Observer:
    """Collects the events of a step and follows what stands in each block. `attach` comes before the first step."""

    waiting: dict[str, int] = field(default_factory=dict)  # name -> tokens to compute
    finished: list[str] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    num_preemptions: int = 0
    _events: list[events.Event] = field(default_factory=list)
    _contents: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _num_new: dict[int, int] = field(default_factory=dict)
    _scheduler: Scheduler | None = None

    def attach(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("the observer has no scheduler to look at: attach comes before the first step")
        return self._scheduler

    def __call__(self, event: events.Event) -> None:
        self._events.append(event)
        if isinstance(event, events.StepScheduled):
            self._note_computed(event)
            self._measure(event)
        elif isinstance(event, events.SequenceEvent):
            self._note_queues(event)
            self._note_new_blocks(event)

    def take_events(self) -> list[events.Event]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken

    def tables(self) -> list[TableView]:
        """The block tables of the running sequences, in the order in which they are served."""
        return [
            TableView(
                _name(sequence), tuple(sequence.block_table.blocks), sequence.num_computed_tokens, sequence.num_tokens
            )
            for sequence in self.scheduler.running
        ]

    def pool(self) -> list[BlockView]:
        """Every block of the pool."""
        blocks = self.scheduler.block_manager
        owners: dict[int, list[str]] = {}
        for table in self.tables():
            for block in table.blocks:
                owners.setdefault(block, []).append(table.name)
        return [
            BlockView(
                number,
                tuple(owners.get(number, ())),
                self._contents.get(number, ()),
                self._num_new.get(number, 0),
                blocks.prefix_cache is not None and number in blocks.prefix_cache,
            )
            for number in range(blocks.num_blocks)
        ]

    # ---- from the events ----------------------------------------------------------------------------------------

    def _note_queues(self, event: events.SequenceEvent) -> None:
        name = sequence_name(event.request_id, event.index)
        if isinstance(event, (events.Queued, events.Preempted)):
            self.waiting[name] = event.num_tokens
            self.num_preemptions += isinstance(event, events.Preempted)
        elif isinstance(event, events.Admitted):
            self.waiting.pop(name, None)
        elif isinstance(event, events.Finished):
            self.waiting.pop(name, None)
            self.finished.append(name)

    def _note_new_blocks(self, event: events.SequenceEvent) -> None:
        """A block that is handed out holds nothing that counts, whatever its last owner left there."""
        if isinstance(event, (events.Admitted, events.BlocksAppended)):
            for block in event.new_blocks:
                self._contents.pop(block, None)

    def _note_computed(self, event: events.StepScheduled) -> None:
        """What this step writes into the blocks. (Of a step that fails nothing is read again.)"""
        size = self.scheduler.block_manager.block_size
        self._num_new.clear()
        for sequence, end in self._ends(event):
            start = min(sequence.num_computed_tokens, end - 1)
            for logical in range(start // size, -(-end // size)):
                first, last = logical * size, min((logical + 1) * size, end)
                block = sequence.block_table.blocks[logical]
                self._contents[block] = tuple(sequence.token_ids[first:last])
                self._num_new[block] = last - max(first, start)

    def _measure(self, event: events.StepScheduled) -> None:
        """Count slots at the moment when the step runs, the tokens that it computes included."""
        running, usage = self.scheduler.running, self.usage
        ends = {sequence.row: end for sequence, end in self._ends(event)}
        used = {block for sequence in running for block in sequence.block_table.blocks}
        usage.slots += len(used) * self.scheduler.block_manager.block_size
        usage.filled += sum(len(self._contents.get(block, ())) for block in used)
        usage.contiguous_slots += len(running) * self.scheduler.table.token_ids.shape[1]
        usage.contiguous_filled += sum(ends.get(one.row, one.num_computed_tokens) for one in running)
        usage.most_blocks = max(usage.most_blocks, len(used))
        usage.most_running = max(usage.most_running, len(running))

    def _ends(self, event: events.StepScheduled) -> list[tuple[Sequence, int]]:
        """The sequences of a step, and how many of their tokens are computed after it."""
        scheduled = {(one.request_id, one.index): one.start + one.num_new_tokens for one in event.sequences}
        return [
            (sequence, scheduled[key])
            for sequence in self.scheduler.running
            if (key := (sequence.group.request.request_id, sequence.index)) in scheduled
        ]


def _name(sequence: Sequence) -> str:
    return sequence_name(sequence.group.request.request_id, sequence.index)

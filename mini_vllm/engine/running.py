"""The running sequences: their order, their rows, and the seats that they take.

Where it stands: beside the waiting queue (`policy.py`); the scheduler moves sequences from one to the other and back.

    4 seats (max_num_seqs)
    a, n = 1    1 seat     row 0
    b, n = 3    3 seats    row 1; its siblings come when the prompt is computed, and their seats are kept until then

What always holds: a sequence that runs has a row of its own, and there are never more than there are seats, siblings to
come included.

In vLLM: `self.running` of `vllm/v1/core/sched/scheduler.py`, and the rows of `vllm/v1/worker/gpu_input_batch.py`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from mini_vllm.engine.policy import SchedulingPolicy
from mini_vllm.engine.sequence import Sequence, SequenceGroup, SequenceStatus
from mini_vllm.engine.sequence_table import SequenceTable


class RunningSequences:
    """Sequences in policy order.

    Args:
        policy: the order.
        table: has a row for each seat.
        num_seats: most sequences that run at once.
    """

    def __init__(self, policy: SchedulingPolicy, table: SequenceTable, num_seats: int) -> None:
        self._policy = policy
        self._table = table
        self._num_seats = num_seats
        self._num_taken = 0
        self._in_order: list[Sequence] = []
        self._of_row: list[Sequence | None] = [None] * num_seats

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._in_order)

    @property
    def first(self) -> Sequence:
        """The first in policy order; somebody must run."""
        return self._in_order[0]

    @property
    def last(self) -> Sequence:
        """The last in policy order; somebody must run."""
        return self._in_order[-1]

    def in_turn(self) -> list[Sequence]:
        """The first in policy order, then decodes, then prefills that have begun; each in policy order."""
        decodes = [sequence for sequence in self._in_order if sequence.is_decoding]
        if len(decodes) == len(self._in_order):
            return decodes
        first = self.first
        prefills = [sequence for sequence in self._in_order if not sequence.is_decoding and sequence is not first]
        return [first, *(sequence for sequence in decodes if sequence is not first), *prefills]

    def in_row(self, row: int) -> Sequence:
        """The sequence that has this row."""
        sequence = self._of_row[row]
        if sequence is None:
            raise RuntimeError(f"scheduler: row {row} of the batch belongs to nobody")
        return sequence

    def has_seats_for(self, group: SequenceGroup) -> bool:
        """Whether a sequence of this group can join."""
        return self._num_taken + group.num_seats <= self._num_seats

    def admit(self, sequence: Sequence) -> None:
        """A sequence joins: it gets a row, and its siblings to come keep their seats."""
        self.seat(sequence)
        self._num_taken += sequence.group.num_seats

    def seat(self, sequence: Sequence) -> None:
        """A sibling takes the seat that was kept for it since the first one was admitted."""
        sequence.status = SequenceStatus.RUNNING
        self._table.admit(sequence)
        self._of_row[sequence.row] = sequence
        insort(self._in_order, sequence, key=self._policy.key)

    def give_up_seat(self) -> None:
        """A sibling to come will not come."""
        self._num_taken -= 1

    def release(self, sequence: Sequence) -> None:
        """A sequence leaves with all seats that were kept for it."""
        self._in_order.remove(sequence)
        self._num_taken -= sequence.group.num_seats
        self._of_row[sequence.row] = None
        self._table.release(sequence)

    def check(self) -> None:
        """Raise RuntimeError if the seats are not those of the sequences (debug mode)."""
        seats = sum(sequence.group.num_seats for sequence in self._in_order)
        if seats != self._num_taken or seats > self._num_seats:
            raise RuntimeError(
                f"scheduler: {self._num_taken} seats counted, {seats} taken, {self._num_seats} there are"
            )

"""Scheduling policies and the waiting queue: who goes first.

Where it stands: the scheduler keeps its waiting and running sequences in the order that a policy gives. A policy is one
method; to try your own, write a class like the two below and name it as `policy="my_module:MyPolicy"`
(`examples/shortest_first_policy.py` does).

In vLLM: `vllm/v1/core/sched/request_queue.py`.
"""

from __future__ import annotations

import heapq
import importlib
from typing import Any, Protocol

from mini_vllm.engine.sequence import Sequence, SequenceStatus
from mini_vllm.errors import InvalidConfigError


class SchedulingPolicy(Protocol):
    """An order of sequences. The smallest key is admitted first and preempted last."""

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        """A sort key that never changes during a sequence's life. Sequences with equal keys go in order of arrival."""
        ...


class FirstComeFirstServed:
    """In order of arrival; siblings in order of their index."""

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        return (sequence.group.request.arrival_index, sequence.index)


class PriorityThenArrival:
    """The request with the smallest `priority` first, then in order of arrival."""

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        request = sequence.group.request
        return (request.priority, request.arrival_index, sequence.index)


class _UsersPolicy:
    """A policy of the user's, whose keys may tie, fail, or be of types that do not compare.

    The order must be one all the same, as a heap compares neighbours: equals go by arrival, and a key that is none is
    refused before a queue has been touched.

    Args:
        policy: the user's object.
        name: as given in the config, for errors.
    """

    def __init__(self, policy: SchedulingPolicy, name: str) -> None:
        self._policy = policy
        self._name = name
        self._first: tuple[Any, ...] | None = None  # the key that all others must compare with

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        try:
            key = self._policy.key(sequence)
            if self._first is None:
                self._first = key
            _ = key < self._first
        except Exception as error:  # whatever the user's code raises
            raise InvalidConfigError(
                f"policy {self._name!r} has no key for a sequence: {type(error).__name__}: {error}", field="policy"
            ) from error
        return (key, sequence.group.request.arrival_index, sequence.index)


_BUILT_IN: dict[str, type[SchedulingPolicy]] = {"fcfs": FirstComeFirstServed, "priority": PriorityThenArrival}


def make_policy(name: str) -> SchedulingPolicy:
    """The policy of that name: a built-in one, or a class given as `module:Class`."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise InvalidConfigError(
            f"policy must be one of {', '.join(_BUILT_IN)}, or module:Class for your own, got {name!r}", field="policy"
        )
    try:
        policy: SchedulingPolicy = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:  # whatever the user's module raises
        raise InvalidConfigError(
            f"policy {name!r} cannot be loaded: {type(error).__name__}: {error}", field="policy"
        ) from error
    if not callable(getattr(policy, "key", None)):
        raise InvalidConfigError(f"policy {name!r} has no method key(sequence)", field="policy")
    return _UsersPolicy(policy, name)


class WaitingQueue:
    """A heap of waiting and preempted sequences, smallest key first.

    A sequence that is aborted while it waits is only marked; `peek` drops marked ones when they come to the top, and
    when they make up half of the heap it is built anew. So each operation costs O(log n), spread over the operations.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[Any, ...], Sequence]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self._policy.key(sequence), sequence))

    def peek(self) -> Sequence | None:
        """The next sequence, which stays in the queue; None if nobody waits."""
        while self._heap and self._heap[0][1].status is SequenceStatus.FINISHED:
            heapq.heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take out what `peek` showed."""
        return heapq.heappop(self._heap)[1]

    def note_finished(self) -> None:
        """One sequence in the queue has just been marked FINISHED."""
        self._num_dead += 1
        if self._num_dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._heap)
            self._num_dead = 0

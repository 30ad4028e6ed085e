"""Events: what the engine reports to whoever listens.

Where it stands: the scheduler and the engine's step make them while they work; `mini-vllm explain` and `--trace` are
listeners. With no listener attached no event is built, so it costs nothing. A listener is called in the engine's thread
and must be quick; several of them are made one by `fan_out`.

    Queued -> Admitted -> [Forked] -> BlocksAppended ... -> Preempted -> Admitted (is_resumed) ... -> Finished
    and around them, in each step:  StepStarted -> StepScheduled -> StepExecuted -> StepFinished

In vLLM: `vllm/distributed/kv_events.py` and the statistics in `vllm/v1/metrics/stats.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from mini_vllm.cache.block_manager import BlockCopy, BlockStats
from mini_vllm.outputs import FinishReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Queued:
    """A new request waits from now on."""

    request_id: str
    index: int
    num_tokens: int


@dataclass(frozen=True)
class Admitted:
    """A waiting or preempted sequence runs from now on; `shared_blocks` come from the prefix cache."""

    request_id: str
    index: int
    num_tokens: int
    num_cached_tokens: int
    shared_blocks: tuple[int, ...]
    new_blocks: tuple[int, ...]
    is_resumed: bool


@dataclass(frozen=True)
class BlocksAppended:
    """A running sequence has grown into new blocks, or got its own copy of a shared one."""

    request_id: str
    index: int
    new_blocks: tuple[int, ...]
    copy: BlockCopy | None


@dataclass(frozen=True)
class Forked:
    """Sibling `index` of an n > 1 request exists from now on and shares all blocks of the first one."""

    request_id: str
    index: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Preempted:
    """A sequence has lost its blocks and waits to be computed again; the `num_tokens` tokens that it knows are kept."""

    request_id: str
    index: int
    num_tokens: int
    freed_blocks: tuple[int, ...]


@dataclass(frozen=True)
class SequenceScheduled:
    """What one sequence computes in this step."""

    request_id: str
    index: int
    start: int
    num_new_tokens: int
    is_prefill: bool


@dataclass(frozen=True)
class StepStarted:
    """Scheduling begins."""


@dataclass(frozen=True)
class StepScheduled:
    """Scheduling is done; the batch goes to the worker."""

    sequences: tuple[SequenceScheduled, ...]
    num_waiting: int
    num_running: int
    blocks: BlockStats


@dataclass(frozen=True)
class StepExecuted:
    """The worker is back with the sampled tokens."""


@dataclass(frozen=True)
class StepFinished:
    """A step has been committed; `seconds` is its whole time."""

    seconds: float
    num_waiting: int
    num_running: int
    blocks: BlockStats


@dataclass(frozen=True)
class Finished:
    """A sequence has ended and given its blocks back."""

    request_id: str
    index: int
    reason: FinishReason
    freed_blocks: tuple[int, ...]


StepEvent = StepStarted | StepScheduled | StepExecuted | StepFinished
SequenceEvent = Queued | Admitted | BlocksAppended | Forked | Preempted | Finished
Event = StepEvent | SequenceEvent
EventListener = Callable[[Event], None]


def sequence_name(request_id: str, index: int) -> str:
    """What to call one of a request's sequences: `A`, and its siblings `A.1`, `A.2`."""
    return request_id if index == 0 else f"{request_id}.{index}"


def fan_out(*listeners: EventListener | None) -> EventListener | None:
    """One listener that calls several, in order; None if nobody listens."""
    attached = [listener for listener in listeners if listener is not None]
    if len(attached) < 2:
        return attached[0] if attached else None

    def call_all(event: Event) -> None:
        for listener in attached:
            listener(event)

    return call_all


def guarded(listener: EventListener | None) -> EventListener | None:
    """The same listener, but what it raises goes into the log: whoever watches must not disturb the engine."""
    if listener is None:
        return None

    def call(event: Event) -> None:
        try:
            listener(event)
        except Exception:
            logger.exception("a listener failed at %s; the engine goes on", type(event).__name__)

    return call

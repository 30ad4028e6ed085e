"""Events: what the engine reports to whoever listens.

Where it stands: the scheduler makes them while it works; `mini-vllm explain` and `--trace` are listeners. With no
listener attached no event is built, so it costs nothing.

In vLLM: `vllm/distributed/kv_events.py` and the statistics in `vllm/v1/metrics/stats.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.outputs import FinishReason


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
    """A sequence has lost its blocks and waits to be computed again."""

    request_id: str
    index: int
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
class StepScheduled:
    """A step is about to run."""

    sequences: tuple[SequenceScheduled, ...]
    num_waiting: int
    num_running: int


@dataclass(frozen=True)
class StepFinished:
    """A step has been committed; `seconds` is its whole time."""

    seconds: float


@dataclass(frozen=True)
class Finished:
    """A sequence has ended and given its blocks back."""

    request_id: str
    index: int
    reason: FinishReason
    freed_blocks: tuple[int, ...]


Event = Admitted | BlocksAppended | Forked | Preempted | StepScheduled | StepFinished | Finished
EventListener = Callable[[Event], None]

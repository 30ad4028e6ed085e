"""The executor: the engine's only door to whatever runs the model.

Where it stands: the engine gives it batches and gets results; whether one process or several do the work is decided
here. Today there is one kind, in the engine's own process; a group of worker processes has the same three methods.

    start-up    1. load the model      2. plan the pool      3. allocate the cache over the engine's sequence table

In vLLM: `vllm/v1/executor/abstract.py` and `vllm/v1/executor/uniproc_executor.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mini_vllm.cache.block_manager import BlockCopy
from mini_vllm.config import EngineConfig
from mini_vllm.engine.scheduled_batch import ModelOutput, ScheduledBatch
from mini_vllm.engine.sequence_table import SequenceTable
from mini_vllm.model.attention import AttentionBackend
from mini_vllm.model.attention_backends import make_backend
from mini_vllm.model.cpu_sampler import CPU_STEPS
from mini_vllm.model.language_model import LanguageModel
from mini_vllm.worker.memory import PoolPlan, plan_pool, slot_size
from mini_vllm.worker.model_runner import ModelRunner
from mini_vllm.worker.threads import settle_threads

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs scheduled batches."""

    def plan_pool(self, max_model_len: int) -> PoolPlan:
        """Decide how many blocks there are, now that the weights are loaded."""
        ...

    def allocate(self, plan: PoolPlan, table: SequenceTable) -> None:
        """Make the cache. `table` is the engine's; it is read at every step."""
        ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Make a step's block copies. Once a step, before `execute`."""
        ...

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        """Run one step. After a failure it may be called again, for the whole batch or for parts of it."""
        ...

    def shutdown(self) -> None:
        """Give the model and the cache up."""
        ...


class InProcessExecutor:
    """One worker, in the engine's process.

    Args:
        config: the engine's options.
        model: loaded, in evaluation mode.
        dtype, device: what the model computes in, and where.
        kernels: whether the C++ kernels are loaded and may be used (`fast_path.prepare_kernels`).
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LanguageModel,
        dtype: torch.dtype,
        device: torch.device,
        kernels: bool = False,
    ) -> None:
        settle_threads(config.threads)
        self._kernels = kernels
        self._config = config
        self._model = model
        self._dtype = dtype
        self._device = device
        self._runner: ModelRunner | None = None

    @property
    def dtype_name(self) -> str:
        """What the model computes in, such as `float32`."""
        return str(self._dtype).removeprefix("torch.")

    def wrap_model(self, wrap: Callable[[LanguageModel], LanguageModel]) -> None:
        """Put something around the model, before `allocate`: benchmarks take the times of its two halves there."""
        self._model = wrap(self._model)

    def plan_pool(self, max_model_len: int) -> PoolPlan:
        block_size = slot_size(self._config, max_model_len)
        backend = self._make_backend(block_size)
        return plan_pool(self._config, max_model_len, backend.block_bytes(self._model.layer_specs), self._device)

    def allocate(self, plan: PoolPlan, table: SequenceTable) -> None:
        self._model.settle_context(plan.max_model_len)
        backend = self._make_backend(plan.block_size)
        backend.allocate(self._model.layer_specs, plan.num_blocks)
        steps = CPU_STEPS if self._kernels else None
        self._runner = ModelRunner(self._model, backend, table, self._device, steps)

    def _make_backend(self, block_size: int) -> AttentionBackend:
        config, layers = self._config, self._model.layer_specs
        return make_backend(
            config.attention_backend, config.cache, block_size, self._dtype, self._device, layers, self._kernels
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._ready_runner().copy_blocks(copies)

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        return self._ready_runner().execute(batch)

    def _ready_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the executor has no cache: allocate comes before execute, and nothing after shutdown")
        return self._runner

    def shutdown(self) -> None:
        self._runner = None

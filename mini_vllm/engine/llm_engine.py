"""`LLMEngine`: requests in, `step`, outputs out.

Where it stands: the heart. It owns every part and no state of its own but the list of outputs not yet handed over.

    add_request -> InputProcessor -> Scheduler.add
                                          |
    step:  Scheduler.schedule -> Executor.execute -> Scheduler.commit -> OutputProcessor -> Scheduler.finish
           what to compute       worker, model,      tokens into the     text, stop         blocks free for
                                 sampler             sequences           strings            the next step

What always holds: every accepted request gets exactly one final output, also when a step fails; after it the id is
forgotten. A step that fails ends only the requests whose own computation fails.

Not safe for several threads: all calls must come from one. `AsyncLLMEngine` is the way in for many.

In vLLM: `vllm/v1/engine/core.py` (`EngineCore.step`) and `vllm/v1/engine/llm_engine.py`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_vllm.cache.block_manager import BlockManager, BlockStats
from mini_vllm.cache.prefix_cache import PrefixCacheStats
from mini_vllm.config import EngineConfig
from mini_vllm.engine import events
from mini_vllm.engine.input_processor import InputProcessor, ModelFacts
from mini_vllm.engine.output_processor import OutputProcessor
from mini_vllm.engine.prompts import Prompt
from mini_vllm.engine.request import Request
from mini_vllm.engine.scheduled_batch import ModelOutput, SampledToken, ScheduledBatch, split_batch
from mini_vllm.engine.scheduler import Scheduler
from mini_vllm.engine.sequence import SequenceGroup
from mini_vllm.engine.trace import TraceWriter
from mini_vllm.errors import EngineDeadError, InvalidConfigError, InvalidRequestError
from mini_vllm.outputs import RequestOutput, TokenLogprobs
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.tokenizer.chat_template import ChatTemplate
from mini_vllm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_vllm.worker.executor import Executor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """What an engine is put together from; `engine/startup.py` makes it from a model, tests make it from doubles.

    Args:
        executor: the model is loaded; the cache is not allocated yet.
        tokenizer, chat_template: the model's.
        facts: what requests are checked against.
        max_model_len: the longest context the model allows, in tokens.
        model_name: what to call the model.
    """

    executor: Executor
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    facts: ModelFacts
    max_model_len: int
    model_name: str


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine between two steps.

    Args:
        num_running, num_waiting: sequences; preempted ones wait.
        blocks: use of the pool.
        num_wasted_slots: token slots in allocated blocks that hold nothing yet.
        prefix_cache: tokens asked for and found since the start; None without a prefix cache.
    """

    num_running: int
    num_waiting: int
    blocks: BlockStats
    num_wasted_slots: int
    prefix_cache: PrefixCacheStats | None


class LLMEngine:
    """An engine over one model.

    Args:
        model: a known short name, a local directory, a local `.gguf` file, or a Hugging Face id.
        config: all options at once, instead of `model` and `options`.
        parts: the parts to use instead of loading a model.
        listener: called with every event of the engine (`engine/events.py`).
        clock: seconds, monotonic; every time in the outputs is on it.
        options: fields of `EngineConfig` by name.

    Raises:
        InvalidConfigError, ModelNotFoundError, DownloadError, ModelLoadError: the start is refused.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        parts: EngineParts | None = None,
        listener: events.EventListener | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        if config is None:
            config = EngineConfig.from_options(model, options)
        if parts is None:
            from mini_vllm.engine.startup import load_parts  # torch is loaded here and not before

            parts = load_parts(config)
        plan = parts.executor.plan_pool(_longest_context(config, parts.max_model_len))
        self.config = config.with_model_limits(plan.max_model_len)
        self.model_name = config.served_model_name or parts.model_name
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        blocks = BlockManager(
            plan.num_blocks, plan.block_size, enable_prefix_caching=bool(config.enable_prefix_caching)
        )
        self.pool = plan
        self._trace = None if config.trace is None else TraceWriter(Path(config.trace), clock=clock)
        listener = events.guarded(events.fan_out(listener, self._trace))
        self.scheduler = Scheduler(self.config, blocks, listener, clock)
        self._executor = parts.executor
        self._executor.allocate(plan, self.scheduler.table)
        self._input_processor = InputProcessor(self.config, parts.tokenizer, parts.chat_template, parts.facts, clock)
        self._output_processor = OutputProcessor(parts.tokenizer, clock)
        self._listener = listener
        self._clock = clock
        self._undelivered: list[RequestOutput] = []
        self._is_shut_down = False

    # ---- requests ---------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        only_final: bool = False,
        **fields: Any,
    ) -> str:
        """Take a request. It is computed by the calls of `step` that follow.

        Args:
            prompt: text, token ids, chat messages (`[{"role": "user", "content": "..."}]`), or an object with `prompt`
                or `prompt_token_ids`.
            sampling_params: how to sample; or give its fields by name (`max_tokens=128, temperature=0.8`).
            request_id: one of your own; it must differ from those of all live requests.
            priority: smaller goes first, under `policy="priority"`.
            cache_salt: share prefix-cache blocks only with requests of the same salt.
            template_options: for chat messages, what `ChatTemplate.render` takes besides them.
            only_final: `step` returns nothing of this request but its final output, which saves making the others.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: the request is refused, and nothing else has happened.
            EngineDeadError: after `shutdown`.
        """
        if sampling_params is not None and fields:
            raise InvalidRequestError(
                f"give sampling_params or its fields by name, not both (got {', '.join(fields)})",
                param="sampling_params",
            )
        params = SamplingParams.from_fields(fields) if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be a SamplingParams, got {type(params).__name__}", param="sampling_params"
            )
        request = self.make_request(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            template_options=template_options,
        )
        self.enqueue(request, only_final=only_final)
        return request.request_id

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Request:
        """The first half of `add_request`: check and tokenise.

        Any thread may call it: all it changes are the counter of arrivals and the stream of seeds, each in one step.
        """
        return self._input_processor.make_request(
            self._fresh_id(request_id),
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            template_options=template_options,
        )

    def enqueue(self, request: Request, *, only_final: bool = False) -> None:
        """The second half of `add_request`: the request waits from now on.

        Raises:
            InvalidRequestError: a live request has its id.
            EngineDeadError: after `shutdown`.
        """
        if self._is_shut_down:
            raise EngineDeadError("this engine has been shut down; make a new one")
        self._fresh_id(request.request_id)
        group = SequenceGroup(request)
        self.scheduler.add(group)  # first, since a policy of the user's own may raise: then nothing has happened
        self._output_processor.add(group, only_final=only_final)

    def abort_request(self, request_id: str) -> None:
        """End a request wherever it stands; its blocks are free before the next step. An unknown id is ignored.

        The final output, with finish reason `abort`, comes from the next `step`.
        """
        group = self._output_processor.group(request_id)
        if group is not None:
            self.scheduler.abort(group)
            self._undelivered.append(self._output_processor.abort(group))

    def is_finished(self, request_id: str) -> bool:
        """Whether the final output has been handed over; true for any id that is not live."""
        is_live = self._output_processor.group(request_id) is not None
        return not is_live and all(output.request_id != request_id for output in self._undelivered)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to return."""
        return bool(self._undelivered) or self._output_processor.num_requests > 0

    # ---- the step ---------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step and return an output for each request that moved (with `only_final`, that ended)."""
        started = self._clock()
        if self._listener is not None and (self.scheduler.num_running or self.scheduler.num_waiting):
            self._listener(events.StepStarted())
        batch = self.scheduler.schedule()
        if batch.is_empty:
            if self.scheduler.num_waiting:
                raise RuntimeError("the scheduler lets nobody run although nothing runs; this is a bug in it")
            return self._take_outputs()
        try:
            if batch.block_copies:
                self._executor.copy_blocks(batch.block_copies)
            result = self._execute(batch)
        except BaseException:  # Ctrl-C: the blocks that this step was given hold nothing, so they go back
            self.scheduler.preempt_all()
            raise
        if self._listener is not None:
            self._listener(events.StepExecuted())
        changes = self.scheduler.commit(batch, result)
        moved, stopped = self._output_processor.process(changes)
        self._undelivered += moved
        self.scheduler.finish(stopped)
        if self._listener is not None:
            scheduler, seconds = self.scheduler, self._clock() - started
            blocks = scheduler.block_manager.stats
            self._listener(events.StepFinished(seconds, scheduler.num_waiting, scheduler.num_running, blocks))
        return self._take_outputs()

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def _execute(self, batch: ScheduledBatch) -> ModelOutput:
        """Run a batch; if that fails, run its sequences one by one and fail only those that fail alone."""
        try:
            return self._executor.execute(batch)
        except Exception:
            logger.exception("a step of %d sequences failed; trying them one by one", len(batch.sequences))
        tokens: dict[int, SampledToken] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        errors: dict[int, str] = {}
        for index, part in enumerate(split_batch(batch)):
            try:
                result = self._executor.execute(part.batch)
            except Exception as error:
                errors[index] = f"{type(error).__name__}: {error}"
                failed = SampledToken(token_id=-1, error=errors[index])
                result = ModelOutput([failed] * len(part.draws), [[]] * len(part.spans))
            tokens.update(zip(part.draws, result.tokens, strict=True))
            prompt_logprobs.update(zip(part.spans, result.prompt_logprobs, strict=True))
        return ModelOutput(
            [tokens[place] for place in range(len(batch.draws))],
            [prompt_logprobs[place] for place in range(len(batch.prompt_logprobs))],
            errors,
        )

    # ---- the rest ---------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Figures of this moment."""
        blocks = self.scheduler.block_manager
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            blocks=blocks.stats,
            num_wasted_slots=self.scheduler.num_wasted_slots,
            prefix_cache=None if blocks.prefix_cache is None else blocks.prefix_cache.stats,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompt beginnings. Running requests go on."""
        self.scheduler.block_manager.reset_prefix_cache()

    def drop_outputs(self, request_ids: Collection[str]) -> None:
        """Forget outputs of these requests that `step` has not returned yet; nobody wants them any more."""
        self._undelivered = [output for output in self._undelivered if output.request_id not in request_ids]

    def return_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Give back outputs that `step` has returned to one who has no use for them: the next `step` returns them."""
        self._undelivered[:0] = outputs

    def shutdown(self) -> None:
        """Give the model and the cache up. From now on requests are refused, and `step` returns nothing."""
        self._is_shut_down = True
        for request_id in self._output_processor.request_ids:
            self.abort_request(request_id)
        self._undelivered.clear()
        self._executor.shutdown()
        if self._trace is not None:
            self._trace.close()

    def _fresh_id(self, request_id: str | None) -> str:
        if request_id is None:
            return f"req-{uuid.uuid4().hex}"
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id must be a non-empty string, got {request_id!r}", param="request_id")
        if not self.is_finished(request_id):
            raise InvalidRequestError(f"request_id {request_id!r} is taken by a live request", param="request_id")
        return request_id


def _longest_context(config: EngineConfig, of_the_model: int) -> int:
    """What the user asked for, or all that the model can."""
    if config.max_model_len is None:
        return of_the_model
    if config.max_model_len > of_the_model:
        raise InvalidConfigError(
            f"max_model_len={config.max_model_len} is more than the {of_the_model} tokens that this model can; "
            "lower it or leave it out",
            field="max_model_len",
        )
    return config.max_model_len

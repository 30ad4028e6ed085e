"""The runner: one workload through one engine, and everything that was seen on the way.

Where it stands: below every benchmark. It is a user of `LLMEngine` like any other: it adds requests, calls `step`, and
reads the outputs. Times are taken when `step` hands a token over, so detokenising is inside them.

What always holds: tokens are counted from what came back, never from what was asked for; a request that failed, or
that came back with another number of tokens than it should have, makes the run void (`BenchmarkError`).

    StepStarted .. StepScheduled .. first logits .. StepExecuted .. StepFinished
         schedule  | prepare+forward |    sample     |    output

In vLLM: `vllm/benchmarks/throughput.py` and `latency.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mini_vllm.benchmark.workload import Workload
from mini_vllm.config import EngineConfig
from mini_vllm.engine import events
from mini_vllm.engine.llm_engine import EngineParts, LLMEngine
from mini_vllm.errors import MiniVLLMError
from mini_vllm.outputs import RequestOutput
from mini_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from mini_vllm.model.attention import AttentionLayerSpec, StepAttention
    from mini_vllm.model.language_model import LanguageModel

WARM_UP_TOKENS = 4

Clock = Callable[[], float]
PartsLoader = Callable[[EngineConfig], EngineParts]


class BenchmarkError(MiniVLLMError):
    """A run that measures nothing: requests failed, or answers differ that must be equal."""


@dataclass(frozen=True)
class StepTimes:
    """Where one step's time went, in seconds.

    Args:
        schedule: choosing the work and its blocks.
        forward: building the inputs, and the transformer.
        sample: logits and the choice of tokens; 0 in a step that draws none.
        output: committing tokens, detokenising, stop conditions.
        num_tokens: computed in the step.
    """

    schedule: float
    forward: float
    sample: float
    output: float
    num_tokens: int

    @property
    def total(self) -> float:
        return self.schedule + self.forward + self.sample + self.output


class StepObserver:
    """Listens to the engine and stands around its model, to take the times of every step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: dict[str, float] = {}
        self._num_tokens = 0
        self.steps: list[StepTimes] = []

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.StepStarted):
            self._marks = {"started": self._clock()}
        elif isinstance(event, events.StepScheduled):
            self._marks["scheduled"] = self._clock()
            self._num_tokens = sum(one.num_new_tokens for one in event.sequences)
        elif isinstance(event, events.StepExecuted):
            self._marks["executed"] = self._clock()
        elif isinstance(event, events.StepFinished):
            self._finish(self._clock())

    def logits_begin(self) -> None:
        """The model is asked for logits; only the first time in a step counts."""
        self._marks.setdefault("forwarded", self._clock())

    def _finish(self, now: float) -> None:
        marks = self._marks
        forwarded = marks.get("forwarded", marks["executed"])
        self.steps.append(
            StepTimes(
                schedule=marks["scheduled"] - marks["started"],
                forward=forwarded - marks["scheduled"],
                sample=marks["executed"] - forwarded,
                output=now - marks["executed"],
                num_tokens=self._num_tokens,
            )
        )


class TimedModel:
    """A language model that tells an observer when the forward pass is over and the logits begin."""

    def __init__(self, model: LanguageModel, observer: StepObserver) -> None:
        self._model = model
        self._observer = observer

    @property
    def layer_specs(self) -> list[AttentionLayerSpec]:
        return self._model.layer_specs

    def settle_context(self, max_model_len: int) -> None:
        self._model.settle_context(max_model_len)

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        return self._model(input_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        self._observer.logits_begin()
        return self._model.logits(hidden)


def load_real_parts(config: EngineConfig) -> EngineParts:
    """The parts of an engine over a model's files."""
    from mini_vllm.engine.startup import load_parts

    return load_parts(config)


@dataclass(frozen=True)
class Bench:
    """An engine to measure, and what measures it."""

    engine: LLMEngine
    observer: StepObserver
    clock: Clock
    dtype: str


def open_bench(config: EngineConfig, load: PartsLoader, clock: Clock) -> Bench:
    """Make the engine, with an observer at its events and around its model."""
    from mini_vllm.worker.executor import InProcessExecutor

    observer = StepObserver(clock)
    dtype: str = config.dtype
    parts = load(config)
    if isinstance(parts.executor, InProcessExecutor):  # another kind has its model elsewhere: no time of sampling then
        parts.executor.wrap_model(lambda model: TimedModel(model, observer))
        dtype = parts.executor.dtype_name
    return Bench(LLMEngine(config=config, parts=parts, listener=observer, clock=clock), observer, clock, dtype)


@dataclass(frozen=True)
class RequestRecord:
    """One request as its user saw it; times in seconds.

    Args:
        arrival: when it was added.
        token_times: when each output token was handed over.
        token_ids: what came back.
        num_prompt_tokens, num_cached_tokens: of its prompt, and how many of them the prefix cache saved.
    """

    arrival: float
    token_times: tuple[float, ...]
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def end_to_end(self) -> float:
        return self.token_times[-1] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Between one token and the next: one fewer than there are tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]


@dataclass(frozen=True)
class RunRecord:
    """One run of a workload.

    Args:
        seconds: from the first request's arrival to the last token.
        requests: in the workload's order.
        steps: every step of the engine.
        held_bytes, wasted_bytes: one entry a step: memory of the blocks in use, and of those slots in them that hold
            no token.
    """

    seconds: float
    requests: tuple[RequestRecord, ...]
    steps: tuple[StepTimes, ...]
    held_bytes: tuple[int, ...]
    wasted_bytes: tuple[int, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_cached_tokens(self) -> int:
        return sum(request.num_cached_tokens for request in self.requests)

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def wasted_share(self) -> float:
        """Of the memory held, over all steps; 0 where nothing is held."""
        held = sum(self.held_bytes)
        return sum(self.wasted_bytes) / held if held else 0.0


@dataclass
class _Progress:
    """A run that goes on: what each request has got so far, by its id."""

    place_of: dict[str, int] = field(default_factory=dict)
    arrivals: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)
    finals: dict[int, RequestOutput] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    wasted: list[int] = field(default_factory=list)


def run_workload(bench: Bench, workload: Workload) -> RunRecord:
    """Run all requests to their end, greedy and past the end of sequence.

    The prefix cache is emptied first: a second run of the same prompts would find all of them.

    Raises:
        BenchmarkError: a request failed or came back with another number of tokens.
        InvalidRequestError: a prompt does not fit the engine.
    """
    bench.engine.reset_prefix_cache()
    bench.observer.steps.clear()
    progress = _Progress()
    waiting = sorted(range(len(workload.items)), key=lambda place: workload.items[place].arrives_after_steps)
    num_steps = 0
    started = now = bench.clock()
    while waiting or bench.engine.has_unfinished_requests():
        is_idle = not bench.engine.has_unfinished_requests()
        while waiting and (is_idle or workload.items[waiting[0]].arrives_after_steps <= num_steps):
            _add(bench, workload, waiting.pop(0), progress)
            is_idle = False
        outputs = bench.engine.step()
        num_steps += 1
        now = bench.clock()
        _take(outputs, now, progress)
        _weigh(bench.engine, progress)
    records = tuple(_record(workload, place, progress) for place in range(len(workload.items)))
    return RunRecord(now - started, records, tuple(bench.observer.steps), tuple(progress.held), tuple(progress.wasted))


def _add(bench: Bench, workload: Workload, place: int, progress: _Progress) -> None:
    item = workload.items[place]
    params = SamplingParams(temperature=0.0, max_tokens=item.num_output_tokens, ignore_eos=True)
    progress.arrivals[place] = bench.clock()
    progress.tokens[place], progress.times[place] = [], []
    progress.place_of[bench.engine.add_request(list(item.prompt_token_ids), params)] = place


def _take(outputs: list[RequestOutput], now: float, progress: _Progress) -> None:
    for output in outputs:
        place = progress.place_of[output.request_id]
        progress.tokens[place] += output.token_ids
        progress.times[place] += [now] * len(output.token_ids)
        if output.finished:
            progress.finals[place] = output


def _weigh(engine: LLMEngine, progress: _Progress) -> None:
    """Note the memory in use between two steps."""
    stats, pool = engine.stats, engine.pool
    progress.held.append(stats.blocks.used * pool.block_bytes)
    progress.wasted.append(stats.num_wasted_slots * pool.block_bytes // pool.block_size)


def _record(workload: Workload, place: int, progress: _Progress) -> RequestRecord:
    item, final, tokens = workload.items[place], progress.finals[place], progress.tokens[place]
    if final.error is not None or len(tokens) != item.num_output_tokens or final.outputs[0].token_ids != tokens:
        raise BenchmarkError(
            f"request {place + 1} of {len(workload.items)} came back with {len(tokens)} tokens instead of "
            f"{item.num_output_tokens} ({final.error or 'no error was given'}); the run does not count"
        )
    return RequestRecord(
        progress.arrivals[place],
        tuple(progress.times[place]),
        tuple(tokens),
        len(final.prompt_token_ids),
        final.num_cached_tokens,
    )


def measure(bench: Bench, workload: Workload, *, repeats: int) -> list[RunRecord]:
    """Warm up with the beginning of a workload, then run it several times.

    Raises:
        BenchmarkError: two runs gave different tokens: greedy answers of one engine must not change.
    """
    run_workload(bench, _warm_up(workload))
    runs = [run_workload(bench, workload) for _ in range(repeats)]
    for number, run in enumerate(runs[1:], 2):
        if answers(run) != answers(runs[0]):
            raise BenchmarkError(f"run {number} gave other tokens than run 1 of the same workload; it does not count")
    return runs


def _warm_up(workload: Workload) -> Workload:
    """A few tokens of the first two requests: what is made at first use is made then."""
    items = workload.first(2).items
    return dataclasses.replace(
        workload,
        items=tuple(
            dataclasses.replace(one, num_output_tokens=min(one.num_output_tokens, WARM_UP_TOKENS)) for one in items
        ),
    )


def answers(run: RunRecord) -> list[tuple[int, ...]]:
    """The tokens of every request."""
    return [request.token_ids for request in run.requests]


def settings_of(engine: LLMEngine) -> dict[str, Any]:
    """What an engine runs with, for the header of a report."""
    config, pool = engine.config, engine.pool
    return {
        "model": engine.model_name,
        "cache": config.cache,
        "scheduling": config.scheduling,
        "prefix_caching": config.enable_prefix_caching,
        "chunked_prefill": config.enable_chunked_prefill,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "pool_tokens": pool.num_tokens if pool.block_bytes else 0,
        "pool_bytes": pool.num_blocks * pool.block_bytes,
    }

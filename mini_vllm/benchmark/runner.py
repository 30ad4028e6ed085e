"""The runner: one workload through one engine, and everything that was seen on the way.

Where it stands: below every benchmark. It is a user of `LLMEngine` like any other: it adds requests, calls `step`, and
reads the outputs. Times are taken when `step` hands a token over, so detokenising is inside them.

What always holds: tokens are counted from what came back, never from what was asked for; a request that failed, or
that came back with another number of tokens than it should have, makes the run void (`BenchmarkError`).

In vLLM: `vllm/benchmarks/throughput.py` and `latency.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mini_vllm.benchmark.progress import NoProgress, Progress
from mini_vllm.benchmark.records import BenchmarkError, RequestRecord, RunRecord
from mini_vllm.benchmark.step_times import StepObserver, TimedModel
from mini_vllm.benchmark.workload import Workload
from mini_vllm.config import EngineConfig
from mini_vllm.engine.llm_engine import EngineParts, LLMEngine
from mini_vllm.outputs import RequestOutput
from mini_vllm.sampling_params import SamplingParams

WARM_UP_TOKENS = 4

Clock = Callable[[], float]
PartsLoader = Callable[[EngineConfig], EngineParts]


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
    progress: Progress


def open_bench(config: EngineConfig, load: PartsLoader, clock: Clock, progress: Progress | None = None) -> Bench:
    """Make the engine, with an observer at its events and around its model."""
    from mini_vllm.worker.executor import InProcessExecutor

    observer = StepObserver(clock)
    dtype: str = config.dtype
    parts = load(config)
    if isinstance(parts.executor, InProcessExecutor):  # another kind has its model elsewhere: only whole steps then
        parts.executor.wrap_model(lambda model: TimedModel(model, observer))
        dtype = parts.executor.dtype_name
    engine = LLMEngine(config=config, parts=parts, listener=observer, clock=clock)
    return Bench(engine, observer, clock, dtype, progress or NoProgress())


@dataclass
class _Course:
    """A run that goes on: what each request has got so far, by its id."""

    place_of: dict[str, int] = field(default_factory=dict)
    arrivals: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)
    finals: dict[int, RequestOutput] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    wasted: list[int] = field(default_factory=list)


def run_workload(bench: Bench, workload: Workload, title: str = "") -> RunRecord:
    """Run all requests to their end, greedy and past the end of sequence.

    Args:
        title: what the progress bar calls the run; the workload's name if it is empty.

    The prefix cache is emptied first: a second run of the same prompts would find all of them.

    Raises:
        BenchmarkError: a request failed or came back with another number of tokens.
        InvalidRequestError: a prompt does not fit the engine.
    """
    bench.engine.reset_prefix_cache()
    bench.observer.steps.clear()
    bench.progress.begin(title or workload.name, workload.num_output_tokens)
    course = _Course()
    waiting = sorted(range(len(workload.items)), key=lambda place: workload.items[place].arrives_after_steps)
    num_steps = 0
    started = now = bench.clock()
    while waiting or bench.engine.has_unfinished_requests():
        is_idle = not bench.engine.has_unfinished_requests()
        while waiting and (is_idle or workload.items[waiting[0]].arrives_after_steps <= num_steps):
            _add(bench, workload, waiting.pop(0), course)
            is_idle = False
        outputs = bench.engine.step()
        num_steps += 1
        now = bench.clock()
        _take(outputs, now, course)
        _weigh(bench.engine, course)
        bench.progress.advance(sum(len(output.token_ids) for output in outputs))
    records = tuple(_record(workload, place, course) for place in range(len(workload.items)))
    return RunRecord(now - started, records, tuple(bench.observer.steps), tuple(course.held), tuple(course.wasted))


def _add(bench: Bench, workload: Workload, place: int, course: _Course) -> None:
    item = workload.items[place]
    params = SamplingParams(temperature=0.0, max_tokens=item.num_output_tokens, ignore_eos=True)
    course.arrivals[place] = bench.clock()
    course.tokens[place], course.times[place] = [], []
    course.place_of[bench.engine.add_request(list(item.prompt_token_ids), params)] = place


def _take(outputs: list[RequestOutput], now: float, course: _Course) -> None:
    for output in outputs:
        place = course.place_of[output.request_id]
        course.tokens[place] += output.token_ids
        course.times[place] += [now] * len(output.token_ids)
        if output.finished:
            course.finals[place] = output


def _weigh(engine: LLMEngine, course: _Course) -> None:
    """Note the memory in use between two steps."""
    stats, pool = engine.stats, engine.pool
    course.held.append(stats.blocks.used * pool.block_bytes)
    course.wasted.append(stats.num_wasted_slots * pool.block_bytes // pool.block_size)


def _record(workload: Workload, place: int, course: _Course) -> RequestRecord:
    item, final, tokens = workload.items[place], course.finals[place], course.tokens[place]
    if final.error is not None or len(tokens) != item.num_output_tokens or final.outputs[0].token_ids != tokens:
        raise BenchmarkError(
            f"request {place + 1} of {len(workload.items)} came back with {len(tokens)} tokens instead of "
            f"{item.num_output_tokens} ({final.error or 'no error was given'}); the run does not count"
        )
    return RequestRecord(
        course.arrivals[place],
        tuple(course.times[place]),
        tuple(tokens),
        len(final.prompt_token_ids),
        final.num_cached_tokens,
    )


def measure(bench: Bench, workload: Workload, *, repeats: int, warm_up: Workload) -> list[RunRecord]:
    """Run something that does not count, then the workload several times.

    Args:
        warm_up: what is made at first use (memory, packed weights, code) is made in this run.

    Raises:
        BenchmarkError: two runs gave different tokens: greedy answers of one engine must not change.
    """
    run_workload(bench, warm_up, "warm-up")
    runs: list[RunRecord] = []
    for number in range(1, repeats + 1):
        runs.append(run_workload(bench, workload, f"run {number} of {repeats}"))
        if runs[-1].answers != runs[0].answers:
            raise BenchmarkError(f"run {number} gave other tokens than run 1 of the same workload; it does not count")
    return runs


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

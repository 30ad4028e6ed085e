"""Latency: what a request waits, over batch sizes and context lengths, and where a step's time goes.

Where it stands: `mini-vllm bench latency`. Each pair of batch size and context length is a run of its own: so many
requests, all there from the start. Times are as a user of the engine sees them: a token's time is when `step` hands it
over.

    step_time   the five parts of the steps in which every request decodes; the table's column `step` is their sum

In vLLM: `vllm/benchmarks/latency.py`, `vllm/benchmarks/sweep/`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mini_vllm.benchmark.options import LatencyOptions
from mini_vllm.benchmark.progress import Progress
from mini_vllm.benchmark.records import RunRecord
from mini_vllm.benchmark.report import Spread, Table, machine, percentile_cell, percentiles
from mini_vllm.benchmark.runner import (
    WARM_UP_TOKENS,
    Clock,
    PartsLoader,
    load_real_parts,
    measure,
    open_bench,
    settings_of,
)
from mini_vllm.benchmark.step_times import PARTS, StepTimes
from mini_vllm.benchmark.workload import Lengths, Workload, synthetic_workload
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError
from mini_vllm.tokenizer.tokenizer import Tokenizer


def bench_latency(
    config: EngineConfig,
    options: LatencyOptions,
    *,
    repeats: int = 3,
    load: PartsLoader = load_real_parts,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure every pair on one engine and return the report.

    Raises:
        BenchmarkError: a run does not count.
        InvalidConfigError: the engine does not start, or the batch sizes or the lengths do not fit it.
    """
    _check_batches_run_whole(config, options)
    bench = open_bench(config, load, clock, progress)
    pairs = [(pair, _workload(bench.engine.tokenizer, *pair, options)) for pair in options.pairs()]
    for _, workload in pairs:
        workload.check_fits(bench.engine.pool.max_model_len)
    results, num_cached_tokens = [], 0
    for (batch_size, input_len), workload in pairs:
        runs = measure(bench, workload, repeats=repeats, warm_up=workload.shortened(WARM_UP_TOKENS))
        num_cached_tokens += runs[0].num_cached_tokens
        results.append({"batch_size": batch_size, "input_len": input_len, **latency_figures(runs)})
    header = {
        **machine(),
        **settings_of(bench.engine),
        "dtype": bench.dtype,
        "workload": f"random prompts, {options.output_len} tokens out",
        "seed": options.seed,
        "ignore_eos": True,
        "repeats": repeats,
        "prefix_cache_hit_tokens": num_cached_tokens,
    }
    bench.engine.shutdown()
    return {"benchmark": "latency", "header": header, "results": results}


def _check_batches_run_whole(config: EngineConfig, options: LatencyOptions) -> None:
    """Where part of a batch waits for the rest, the times are of another batch size than the table would say."""
    largest = max(size for size, _ in options.pairs())
    if config.scheduling == "sequential":
        most, limit = 1, "scheduling='sequential'" + (" (from cache='none')" if config.cache == "none" else "")
        remedy = "choose another scheduling"
    else:
        most, limit = config.max_num_seqs, f"max_num_seqs={config.max_num_seqs}"
        remedy = "raise max_num_seqs"
    if largest > most:
        raise InvalidConfigError(
            f"batch_sizes asks for {largest} requests at once, and {limit} runs {most}; leave batch sizes over {most} "
            f"out, or {remedy}",
            field="batch_sizes",
        )


def _workload(tokenizer: Tokenizer, batch_size: int, input_len: int, options: LatencyOptions) -> Workload:
    return synthetic_workload(
        tokenizer,
        num_requests=batch_size,
        input_len=Lengths("fixed", input_len, input_len),
        output_len=Lengths("fixed", options.output_len, options.output_len),
        seed=options.seed,
    )


def latency_figures(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Percentiles over the requests of all runs; the step's parts over all decode steps."""
    requests = [request for run in runs for request in run.requests]
    medians = [statistics.median(request.end_to_end for request in run.requests) for run in runs]
    return {
        "time_to_first_token": percentiles([request.time_to_first_token for request in requests]),
        "inter_token": percentiles([gap for request in requests for gap in request.gaps]),
        "end_to_end": percentiles([request.end_to_end for request in requests]),
        "end_to_end_medians_of_runs": asdict(Spread.of(medians)),
        "step_time": step_breakdown([step for run in runs for step in run.steps], len(runs[0].requests)),
    }


def step_breakdown(steps: Sequence[StepTimes], batch_size: int) -> dict[str, float]:
    """Median seconds of each part of the steps in which all requests decode; empty if there were none.

    `total` is the median of whole steps, so the parts add up to it nearly, not exactly. A median, since one step that
    the operating system interrupted would move a mean.
    """
    decodes = [step for step in steps if step.num_decodes == batch_size and step.num_prefills == 0]
    if not decodes:
        return {}
    return {name: statistics.median(getattr(step, name) for step in decodes) for name in (*PARTS, "total")}


def latency_table(report: dict[str, Any]) -> Table:
    """The report for people, in milliseconds."""
    rows = []
    for result in report["results"]:
        cells = [percentile_cell(result[name]) for name in ("time_to_first_token", "inter_token", "end_to_end")]
        step = result["step_time"]
        cells += [f"{1e3 * step[name]:.2f}" if step else "-" for name in (*PARTS, "total")]
        rows.append((str(result["batch_size"]), str(result["input_len"]), *cells))
    columns = ("batch", "prompt", "first token", "inter-token", "end to end", *PARTS, "step")
    return Table("Latency in ms: p50 / p90 / p99; median parts of a decode step", columns, tuple(rows))

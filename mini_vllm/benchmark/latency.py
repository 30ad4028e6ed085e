"""Latency: what a request waits, over batch sizes, and where a step's time goes.

Where it stands: `mini-vllm bench latency`. Each batch size is a run of its own: so many requests, all there from the
start. Times are as a user of the engine sees them: a token's time is when `step` hands it over.

In vLLM: `vllm/benchmarks/latency.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from mini_vllm.benchmark.report import Spread, Table, machine, percentiles
from mini_vllm.benchmark.runner import (
    Clock,
    PartsLoader,
    RunRecord,
    StepTimes,
    load_real_parts,
    measure,
    open_bench,
    settings_of,
)
from mini_vllm.benchmark.workload import Lengths, synthetic_workload
from mini_vllm.config import EngineConfig

PARTS = ("schedule", "forward", "sample", "output")


def bench_latency(
    config: EngineConfig,
    *,
    batch_sizes: Sequence[int],
    input_len: int,
    output_len: int,
    repeats: int = 3,
    seed: int = 0,
    load: PartsLoader = load_real_parts,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """Measure every batch size on one engine and return the report.

    Raises:
        BenchmarkError: a run does not count.
        InvalidConfigError, InvalidRequestError: the engine does not start, or the lengths do not fit it.
    """
    bench = open_bench(config, load, clock)
    results, num_cached_tokens = [], 0
    for batch_size in batch_sizes:
        workload = synthetic_workload(
            bench.engine.tokenizer,
            num_requests=batch_size,
            input_len=Lengths("fixed", input_len, input_len),
            output_len=Lengths("fixed", output_len, output_len),
            seed=seed,
        )
        runs = measure(bench, workload, repeats=repeats)
        num_cached_tokens += runs[0].num_cached_tokens
        results.append({"batch_size": batch_size, **latency_figures(runs)})
    header = {
        **machine(),
        **settings_of(bench.engine),
        "dtype": bench.dtype,
        "workload": f"{input_len} random tokens in, {output_len} out",
        "seed": seed,
        "ignore_eos": True,
        "repeats": repeats,
        "prefix_cache_hit_tokens": num_cached_tokens,
    }
    bench.engine.shutdown()
    return {"benchmark": "latency", "header": header, "results": results}


def latency_figures(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Percentiles over the requests of all runs; the step's parts over all decode steps."""
    requests = [request for run in runs for request in run.requests]
    medians = [statistics.median(request.end_to_end for request in run.requests) for run in runs]
    end_to_end = Spread.of(medians)
    return {
        "time_to_first_token": percentiles([request.time_to_first_token for request in requests]),
        "inter_token": percentiles([gap for request in requests for gap in request.gaps]),
        "end_to_end": percentiles([request.end_to_end for request in requests]),
        "end_to_end_medians_of_runs": [end_to_end.median, end_to_end.low, end_to_end.high],
        "decode_step": step_breakdown([step for run in runs for step in run.steps], len(runs[0].requests)),
    }


def step_breakdown(steps: Sequence[StepTimes], batch_size: int) -> dict[str, float]:
    """Mean seconds of each part of the steps that compute one token a request; empty if there were none."""
    decodes = [step for step in steps if step.num_tokens == batch_size]
    if not decodes:
        return {}
    parts = {name: statistics.fmean(getattr(step, name) for step in decodes) for name in PARTS}
    return {**parts, "total": sum(parts.values())}


def latency_table(report: dict[str, Any]) -> Table:
    """The report for people, in milliseconds."""
    rows = []
    for result in report["results"]:
        cells = [_cell(result[name]) for name in ("time_to_first_token", "inter_token", "end_to_end")]
        step = result["decode_step"]
        cells += [f"{1e3 * step[name]:.2f}" if step else "-" for name in (*PARTS, "total")]
        rows.append((str(result["batch_size"]), *cells))
    columns = ("batch", "first token", "inter-token", "end to end", *PARTS, "decode step")
    return Table("Latency in ms: p50 / p90 / p99; mean parts of a decode step", columns, tuple(rows))


def _cell(values: dict[str, float]) -> str:
    return " / ".join(f"{1e3 * value:.1f}" for value in values.values()) or "-"

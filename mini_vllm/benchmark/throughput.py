"""Throughput: how many tokens a second, with all requests there from the start.

Where it stands: `mini-vllm bench throughput`. In vLLM: `vllm/benchmarks/throughput.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mini_vllm.benchmark.progress import Progress
from mini_vllm.benchmark.records import RunRecord
from mini_vllm.benchmark.report import Spread, Table, machine, percentiles
from mini_vllm.benchmark.runner import Clock, PartsLoader, load_real_parts, measure, open_bench, settings_of
from mini_vllm.benchmark.workload import Workload
from mini_vllm.config import EngineConfig
from mini_vllm.tokenizer.tokenizer import Tokenizer


def bench_throughput(
    config: EngineConfig,
    workload_of: Callable[[Tokenizer], Workload],
    *,
    repeats: int = 3,
    load: PartsLoader = load_real_parts,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure and return the report. The warm-up is a whole run: batches of every size have been seen by then.

    Raises:
        BenchmarkError: a run does not count.
        InvalidConfigError: the engine does not start, or a request does not fit it.
    """
    bench = open_bench(config, load, clock, progress)
    workload = workload_of(bench.engine.tokenizer)
    workload.check_fits(bench.engine.pool.max_model_len)
    runs = measure(bench, workload, repeats=repeats, warm_up=workload)
    header = {
        **machine(),
        **settings_of(bench.engine),
        "dtype": bench.dtype,
        "workload": workload.name,
        "seed": workload.seed,
        "ignore_eos": True,
        "prefix_cache_hit_tokens": runs[0].num_cached_tokens,
    }
    bench.engine.shutdown()
    return {"benchmark": "throughput", "header": header, "runs": [_run_figures(run) for run in runs]}


def _run_figures(run: RunRecord) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "num_requests": len(run.requests),
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_cached_tokens": run.num_cached_tokens,
        "num_output_tokens": run.num_output_tokens,
        "requests_per_second": len(run.requests) / run.seconds,
        "output_tokens_per_second": run.output_tokens_per_second,
        "total_tokens_per_second": (run.num_output_tokens + run.num_prompt_tokens) / run.seconds,
        "time_to_first_token": percentiles([request.time_to_first_token for request in run.requests]),
    }


def throughput_table(report: dict[str, Any]) -> Table:
    """The report for people: each figure's median and spread over the runs."""
    runs = report["runs"]
    names = ("seconds", "requests_per_second", "output_tokens_per_second", "total_tokens_per_second")
    rows = [(name.replace("_", " "), Spread.of([run[name] for run in runs]).text(2)) for name in names]
    rows += [(name.replace("_", " "), str(runs[0][name])) for name in ("num_prompt_tokens", "num_output_tokens")]
    return Table(f"Throughput, {len(runs)} runs: median (lowest to highest)", ("figure", "value"), tuple(rows))

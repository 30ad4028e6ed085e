"""Serving: load on any server that speaks OpenAI's protocol, and what its clients wait.

Where it stands: `mini-vllm bench serving`. It knows the server by its URL alone: mini vLLM's own, vLLM's, llama.cpp's.

    arrivals    poisson   each request on its own, gaps drawn from an exponential distribution
                burst     `burst_size` requests at the same moment, bursts evenly spread
    clock       a request's time begins when it arrives, also when the concurrency limit or a slow client holds it
                back: otherwise a server that is too slow would look better the less it is asked
    goodput     requests a second of which both hold: time to first token, and time per token after it, in their limits

Each run has prompts of its own (the seed goes up by one), or the second run would meet the server's prefix cache.

What always holds: tokens are counted from what came back. A request that fails is counted as failed and is in no other
figure; a run in which all failed is refused.

In vLLM: `vllm/benchmarks/serve.py`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from mini_vllm.benchmark.http_stream import HttpFailure, Server, get_json
from mini_vllm.benchmark.load_client import LoadClient, ServedRequest, served_model
from mini_vllm.benchmark.options import ServingOptions, WorkloadOptions
from mini_vllm.benchmark.progress import NoProgress, Progress
from mini_vllm.benchmark.records import BenchmarkError
from mini_vllm.benchmark.report import Spread, Table, percentile_cell, percentiles, processor
from mini_vllm.benchmark.workload_files import make_workload
from mini_vllm.tokenizer.tokenizer import Tokenizer


def arrival_times(count: int, rate: float, options: ServingOptions, seed: int) -> list[float]:
    """Seconds from the start at which each request is due.

    Args:
        rate: requests a second in the long run; infinite for all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    if options.burst_size is not None:  # arrivals=burst
        return [place // options.burst_size * options.burst_size / rate for place in range(count)]
    source, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += source.expovariate(rate)
    return times


def bench_serving(
    options: ServingOptions,
    workload: WorkloadOptions,
    tokenizer: Tokenizer,
    *,
    repeats: int = 3,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Load the server at every rate and return the report.

    Raises:
        BenchmarkError: the server is not there, or every request of a run failed.
    """
    return asyncio.run(_bench(options, workload, tokenizer, repeats, progress or NoProgress()))


async def _bench(
    options: ServingOptions, workload: WorkloadOptions, tokenizer: Tokenizer, repeats: int, progress: Progress
) -> dict[str, Any]:
    server = Server.at(options.url, options.api_key)
    client = LoadClient(server, options, await served_model(server, options), tokenizer, progress)
    unused_seed = workload.seed + len(options.rates()) * repeats  # prompts that no run will have
    await client.warm_up(make_workload(replace(workload, seed=unused_seed), tokenizer))
    results, name, seed = [], "", workload.seed
    for rate in options.rates():
        runs = []
        for number in range(1, repeats + 1):
            made = make_workload(replace(workload, seed=seed), tokenizer)
            arrivals = arrival_times(len(made.items), rate, options, seed)
            runs.append(await client.run(made, arrivals, f"{rate:g} requests/s, run {number} of {repeats}"))
            name, seed = made.name, seed + 1
        results.append({"request_rate": str(rate), **serving_figures(runs, options)})
    header = {
        **processor(),
        "url": options.url,
        "model": client.model,
        "server": await _version(server),
        "workload": name,
        "seed": workload.seed,
        "repeats": repeats,
        "prefix_cache_hit_tokens": sum(result["num_cached_tokens"] for result in results),
        **{key: value for key, value in asdict(options).items() if key not in ("url", "api_key", "served_model")},
    }
    return {"benchmark": "serving", "header": header, "results": results}


async def _version(server: Server) -> str | None:
    """What the server says it is, if it does."""
    try:
        said = await get_json(server, "/version")
    except HttpFailure:
        return None
    return str(said.get("version")) if isinstance(said, dict) else None


def serving_figures(runs: Sequence[Sequence[ServedRequest]], options: ServingOptions) -> dict[str, Any]:
    """The figures of one rate: rates as median and spread over the runs, waits over the requests of all runs.

    Raises:
        BenchmarkError: a run in which every request failed.
    """
    good_runs = [[one for one in run if one.error is None] for run in runs]
    errors = [one.error for run in runs for one in run if one.error is not None]
    if not all(good_runs):
        raise BenchmarkError(f"every request of a run failed: {errors[0]}")
    served = [one for run in good_runs for one in run]
    seconds = [max(one.token_times[-1] for one in run) - min(one.arrival for one in run) for run in good_runs]

    def rate(counts: Sequence[int]) -> dict[str, float]:
        return asdict(Spread.of([count / duration for count, duration in zip(counts, seconds, strict=True)]))

    return {
        "num_requests": sum(map(len, runs)),
        "num_failed": len(errors),
        "first_error": errors[0] if errors else None,
        "num_short": sum(one.num_output_tokens != one.num_wanted_tokens for one in served),
        "num_prompt_tokens": sum(one.num_prompt_tokens for one in served),
        "num_output_tokens": sum(one.num_output_tokens for one in served),
        "num_cached_tokens": sum(one.num_cached_tokens for one in served),
        "requests_per_second": rate([len(run) for run in good_runs]),
        "output_tokens_per_second": rate([sum(one.num_output_tokens for one in run) for run in good_runs]),
        "goodput": rate([sum(one.is_good(options) for one in run) for run in good_runs]),
        "good_share": sum(one.is_good(options) for one in served) / sum(map(len, runs)),
        "time_to_first_token": percentiles([one.time_to_first_token for one in served]),
        "time_per_output_token": percentiles([one.time_per_output_token for one in served]),
        "end_to_end": percentiles([one.end_to_end for one in served]),
    }


def serving_table(report: Mapping[str, Any]) -> Table:
    """The report for people; waits in milliseconds."""
    header = report["header"]
    rows = []
    for result in report["results"]:
        waits = [
            percentile_cell(result[name]) for name in ("time_to_first_token", "time_per_output_token", "end_to_end")
        ]
        rates = [
            Spread(**result[name]).text(2) for name in ("requests_per_second", "output_tokens_per_second", "goodput")
        ]
        counts = (result["num_requests"], result["num_failed"], result["num_short"])
        rows.append((result["request_rate"], *map(str, counts), *rates, f"{result['good_share']:.0%}", *waits))
    columns = (
        *("asked, req/s", "sent", "failed", "short", "req/s", "output tok/s", "goodput, req/s", "good"),
        *("first token", "a later token", "end to end"),
    )
    limits = f"{1e3 * header['ttft_limit']:g} ms to the first token, {1e3 * header['tpot_limit']:g} ms a later one"
    return Table(f"Serving; waits in ms: p50 / p90 / p99; good: within {limits}", columns, tuple(rows))

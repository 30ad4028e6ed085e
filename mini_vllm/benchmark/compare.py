"""Compare: this engine and others on one workload, one after the other, each in a fresh process.

Where it stands: `mini-vllm bench compare`. `peers.py` runs each of them. The phases:

    mixed        the workload of the command line, all requests there from the start      output tokens a second
    one stream   one prompt, one answer                                                   output tokens a second
    prefill      long prompts, one token each                                             prompt tokens a second
    start        from the start of the process to a first token, a warm disk assumed      seconds

An absolute figure means nothing on another machine; the ratios do. They are this engine over the peer.

What always holds: every engine gets the same token ids and must bring back exactly as many tokens as were asked for.
This engine's runs must agree with each other. Others compute in other orders, so how many of their answers are equal to
ours is shown and not demanded.

In vLLM: nothing; its benchmarks measure vLLM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mini_vllm.benchmark.options import CompareOptions, WorkloadOptions
from mini_vllm.benchmark.peers import Peer, check_starts, load_url, model_for, peers_of, run_process
from mini_vllm.benchmark.progress import NoProgress, Progress
from mini_vllm.benchmark.records import BenchmarkError
from mini_vllm.benchmark.report import Spread, Table, processor
from mini_vllm.benchmark.workload import Lengths, Workload, synthetic_workload
from mini_vllm.benchmark.workload_files import make_workload
from mini_vllm.config import EngineConfig
from mini_vllm.model.model_files import load_model_config
from mini_vllm.store.model_store import ModelFiles, resolve_model
from mini_vllm.tokenizer.tokenizer import Tokenizer, load_tokenizer

OURS = "mini-vllm"
_LONGEST_REASON = 40  # characters of a peer's error in its cell; all of it stands below the table
MIXED, ONE_STREAM, PREFILL = "mixed", "one stream", "prefill"


def bench_compare(
    config: EngineConfig,
    options: CompareOptions,
    workload: WorkloadOptions,
    *,
    repeats: int = 3,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure this engine and every peer and return the report. A peer that fails has its error in the report.

    Raises:
        BenchmarkError: this engine failed, or its runs disagree.
        InvalidConfigError, ModelNotFoundError, DownloadError, ModelLoadError: the options or the model are wrong, or a
            peer plainly cannot start; then nothing has been measured.
    """
    progress = progress or NoProgress()
    files = resolve_model(config.model, revision=config.revision)
    tokenizer, dtype = load_tokenizer(files), resolved_dtype(config, files)
    peers = _peers_and_models(options, files, dtype)
    phases = phases_of(tokenizer, options, workload)
    longest = config.max_model_len or load_model_config(files).max_position_embeddings
    for phase in phases.values():
        phase.check_fits(longest)
    job = _job(config, dtype, phases, repeats)
    progress.begin(OURS, len(peers) + 1)
    ours = _own_result(config, job, options.peer_timeout)
    results = [{"engine": OURS, **ours}]
    for peer, model in peers:
        progress.begin(peer.label, len(peers) + 1)
        progress.advance(len(results))
        if peer.kind == "url":
            result = asyncio.run(load_url(peer, tokenizer, phases, repeats, options.peer_timeout))
        else:
            result = run_process(peer.command, {**job, "engine": peer.kind, "model": model}, options.peer_timeout)
        results.append({"engine": peer.label, **result})
    header = _header(options, workload, phases[MIXED])
    header |= {"model": files.name, "dtype": dtype, "threads": job["threads"], "repeats": repeats}
    return {
        "benchmark": "compare",
        "header": header,
        "results": [_figures(one, ours, job["phases"]) for one in results],
    }


def _peers_and_models(options: CompareOptions, files: ModelFiles, dtype: str) -> list[tuple[Peer, str]]:
    """Each peer with what it runs; one that plainly cannot start is refused here, before minutes go into the others."""
    peers = [(peer, model_for(peer, files, dtype)) for peer in peers_of(options)]
    for peer, _ in peers:
        check_starts(peer)
    return peers


def _header(options: CompareOptions, workload: WorkloadOptions, mixed: Workload) -> dict[str, Any]:
    return {
        **processor(),
        "workload": mixed.name,
        "one_stream": f"{options.stream_input_len} in, {options.stream_output_len} out",
        "prefill": f"{options.num_prefills} x {options.prefill_len}",
        "seed": workload.seed,
        "prefix_caching": False,
        "ignore_eos": True,
    }


def phases_of(tokenizer: Tokenizer, options: CompareOptions, workload: WorkloadOptions) -> dict[str, Workload]:
    """The three workloads."""

    def random(count: int, input_len: int, output_len: int, seed: int, origin: str) -> Workload:
        return synthetic_workload(
            tokenizer,
            num_requests=count,
            input_len=Lengths("fixed", input_len, input_len),
            output_len=Lengths("fixed", output_len, output_len),
            seed=seed,
            origin=origin,
        )

    lens = (options.stream_input_len, options.stream_output_len)
    return {
        MIXED: make_workload(workload, tokenizer),
        ONE_STREAM: random(1, *lens, workload.seed + 1, "stream_input_len and stream_output_len"),
        PREFILL: random(options.num_prefills, options.prefill_len, 1, workload.seed + 2, "prefill_len"),
    }


def _as_job(phase: Workload) -> dict[str, Any]:
    return {
        "prompts": [list(item.prompt_token_ids) for item in phase.items],
        "output_lens": [item.num_output_tokens for item in phase.items],
        "is_batch": phase.num_output_tokens > len(phase.items) > 1,  # prefills are as good one after the other
    }


def resolved_dtype(config: EngineConfig, files: ModelFiles) -> str:
    """What this engine would compute in, for all engines to compute in."""
    from mini_vllm.model.device import resolve_device
    from mini_vllm.model.dtype import resolve_dtype

    device = resolve_device(config.device)
    choice = resolve_dtype(config.dtype, device, load_model_config(files).checkpoint_dtype)
    return str(choice.dtype).removeprefix("torch.")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _job(config: EngineConfig, dtype: str, phases: Mapping[str, Workload], repeats: int) -> dict[str, Any]:
    """What every engine is told; see `peer_process.run`."""
    items = [item for phase in phases.values() for item in phase.items]
    return {
        "dtype": dtype,
        "threads": config.threads or _usable_cores(),
        "max_model_len": max(len(item.prompt_token_ids) + item.num_output_tokens for item in items) + 1,
        "max_num_seqs": config.max_num_seqs,
        "repeats": repeats,
        "phases": {name: _as_job(phase) for name, phase in phases.items()},
    }


def _own_result(config: EngineConfig, job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    # Nobody's prefix cache is on: a second run would find the prompts of the first.
    options = {**dataclasses.asdict(config), "dtype": job["dtype"], "enable_prefix_caching": False}
    options["max_model_len"] = options["max_model_len"] or job["max_model_len"]
    result = run_process((sys.executable,), {**job, "engine": OURS, "options": options}, timeout)
    if "error" in result:
        raise BenchmarkError(f"this engine failed: {result['error']}")
    if unstable := [name for name, phase in result["phases"].items() if not phase["is_stable"]]:
        raise BenchmarkError(f"two runs of {unstable[0]} gave different tokens; the comparison does not count")
    return result


def _figures(result: dict[str, Any], ours: dict[str, Any], jobs: Mapping[str, Any]) -> dict[str, Any]:
    """A result with its speeds and ratios in place of its answers."""
    if "error" in result:
        return result
    phases = {}
    for name, phase in result["phases"].items():
        wanted = sum(jobs[name]["output_lens"])
        if set(phase["num_output_tokens"]) != {wanted}:
            got = next(count for count in phase["num_output_tokens"] if count != wanted)
            return {"engine": result["engine"], "error": f"{got} tokens came back in {name} instead of {wanted}"}
        count = sum(map(len, jobs[name]["prompts"])) if name == PREFILL else wanted
        speed = Spread.of([count / seconds for seconds in phase["seconds"]])
        own_speed = Spread.of([count / seconds for seconds in ours["phases"][name]["seconds"]])
        phases[name] = {
            "tokens_per_second": dataclasses.asdict(speed),
            "ratio": own_speed.median / speed.median,
            "num_equal": _num_equal(ours["phases"][name]["answers"], phase["answers"]),
            "num_requests": len(jobs[name]["prompts"]),
        }
    return {**result, "phases": phases}


def _num_equal(ours: Sequence[Any], theirs: Sequence[Any] | None) -> int | None:
    return None if theirs is None else sum(one == other for one, other in zip(ours, theirs, strict=True))


def compare_table(report: Mapping[str, Any]) -> Table:
    """The report for people."""
    columns = ["engine", "version", "start, s"]
    for name in (MIXED, ONE_STREAM, PREFILL):
        columns += [f"{name}, tok/s", "ours / theirs"]
    rows = [_row(result) for result in report["results"]]
    notes = [f"{label} failed: {error}" for label, error in failures(report).items()]
    return Table("This engine and others", (*columns, "equal answers"), tuple(rows), tuple(notes))


def failures(report: Mapping[str, Any]) -> dict[str, str]:
    """The peers without figures, and why."""
    return {one["engine"]: " ".join(one["error"].split()) for one in report["results"] if "error" in one}


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in result:
        reason = textwrap.shorten(result["error"], _LONGEST_REASON, placeholder=" ...")
        return (result["engine"], f"failed: {reason}", *["-"] * 8)
    start = result["first_token_seconds"]
    cells = [result["engine"], result["version"] or "-", "-" if start is None else f"{start:.1f}"]
    for name in (MIXED, ONE_STREAM, PREFILL):
        phase = result["phases"].get(name)
        cells += ["-", "-"] if phase is None else [Spread(**phase["tokens_per_second"]).text(), f"{phase['ratio']:.2f}"]
    mixed = result["phases"].get(MIXED)
    is_known = mixed is not None and mixed["num_equal"] is not None
    return (*cells, f"{mixed['num_equal']} of {mixed['num_requests']}" if is_known else "-")

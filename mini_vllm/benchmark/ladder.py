"""The ladder: what each idea of the engine buys, one rung after the other.

Where it stands: `mini-vllm bench ladder`, `make bench`. Every rung is the real engine with other switches:

    rung                        workload            what changes from the rung before
    no cache                    mixed, the first    every step computes all tokens again
    contiguous, one at a time   mixed, the first    keys and values are kept, in one slot of max_model_len
    static batches              mixed               several slots; a batch ends when its last member does
    continuous                  mixed               a slot is taken again as soon as it is free
    paged                       mixed               the same memory in small blocks: more requests fit at once
    paged                       shared prefix       (to compare the next with)
    + prefix cache              shared prefix       equal beginnings are computed once
    paged + prefix cache        long prompts        (to compare the next with)
    + chunked prefill           long prompts        a long prompt is computed in pieces beside the running answers
    + fast kernels              each of the three   the same arithmetic in C++; all rungs before are plain PyTorch

Where the kernels cannot be had (no compiler, a GPU), their rungs are left out, and the report says why.

The first two rungs take one request at a time and would take for ever, so they run the first few requests only; a
figure per second is not hurt by that. Rungs with slots and rungs with blocks have the same memory for keys and values.

What always holds: rungs of one workload give the same greedy tokens, or the run is refused (`equality.py`). That is
checked in float32, the default here. In bfloat16 the plain PyTorch path may choose otherwise where two tokens are
nearly equal; there the number of differing answers is reported instead.

In vLLM: nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mini_vllm.benchmark.equality import Answers, count_near_ties
from mini_vllm.benchmark.options import LadderOptions
from mini_vllm.benchmark.progress import Named, NoProgress, Progress
from mini_vllm.benchmark.records import RunRecord
from mini_vllm.benchmark.report import Spread, Table, machine, percentiles
from mini_vllm.benchmark.runner import (
    WARM_UP_TOKENS,
    Bench,
    Clock,
    PartsLoader,
    load_real_parts,
    measure,
    open_bench,
)
from mini_vllm.benchmark.workload import Lengths, WorkItem, Workload, synthetic_workload
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError, KernelBuildError
from mini_vllm.model.device import resolve_device
from mini_vllm.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16")  # those of the C++ kernels


@dataclass(frozen=True)
class Rung:
    """One way to run the engine.

    Args:
        name: what the table calls it.
        workload: `mixed`, `shared prefix` or `long prompts`.
        options: fields of `EngineConfig`.
        one_at_a_time: it runs the first few requests only.
    """

    name: str
    workload: str
    options: Mapping[str, Any]
    one_at_a_time: bool = False


def rungs(size: LadderOptions, block_size: int) -> list[Rung]:
    """The ladder from the bottom up."""
    # Every switch is set in every rung: `config` has settled its defaults for a cache that is not the rung's.
    plain = {
        "scheduling": "continuous",
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "kernels": "none",
    }
    slots = {**plain, "cache": "contiguous", "num_kv_blocks": size.num_slots}
    # Rounded up: one slot's worth of blocks holds the longest sequence, as the slot does.
    paged = {**plain, "cache": "paged", "num_kv_blocks": -(-size.num_slots * size.max_model_len // block_size)}
    cached = {**paged, "enable_prefix_caching": True}
    chunked = {**cached, "enable_chunked_prefill": True, "max_num_batched_tokens": size.chunk}
    fast = {"kernels": "cpu"}
    return [
        Rung("no cache", "mixed", {**plain, "cache": "none", "scheduling": "sequential"}, one_at_a_time=True),
        Rung(
            "contiguous, one at a time",
            "mixed",
            {**slots, "scheduling": "sequential", "num_kv_blocks": 1},
            one_at_a_time=True,
        ),
        Rung("static batches", "mixed", {**slots, "scheduling": "static"}),
        Rung("continuous", "mixed", slots),
        Rung("paged", "mixed", paged),
        Rung("paged", "shared prefix", paged),
        Rung("+ prefix cache", "shared prefix", cached),
        Rung("paged + prefix cache", "long prompts", cached),
        Rung("+ chunked prefill", "long prompts", chunked),
        Rung("+ fast kernels", "mixed", {**paged, **fast}),
        Rung("+ fast kernels", "shared prefix", {**cached, **fast}),
        Rung("+ fast kernels", "long prompts", {**chunked, **fast}),
    ]


def workloads(tokenizer: Tokenizer, size: LadderOptions) -> dict[str, Workload]:
    """The three workloads by name."""
    seed = size.seed
    input_len, output_len = Lengths.parse(size.input_len), Lengths.parse(size.output_len)
    mixed = synthetic_workload(
        tokenizer, num_requests=size.num_requests, input_len=input_len, output_len=output_len, seed=seed
    )
    shared = synthetic_workload(
        tokenizer,
        num_requests=size.num_requests,
        input_len=Lengths("fixed", input_len.low, input_len.low),
        output_len=Lengths("fixed", output_len.low, output_len.low),
        shared_prefix_len=size.prefix_len,
        seed=seed + 1,
        origin="prefix_len, input_len and output_len",
    )
    # One request comes before the others: what is being computed in the same step cannot be shared yet.
    shared = Workload(shared.name, (shared.items[0], *(_late(item, 1) for item in shared.items[1:])), shared.seed)
    return {"mixed": mixed, "shared prefix": shared, "long prompts": _long_prompts(tokenizer, size, seed + 2)}


def _long_prompts(tokenizer: Tokenizer, size: LadderOptions, seed: int) -> Workload:
    """Short questions with long answers, and long prompts that come in between, evenly spread."""
    input_len, output_len = Lengths.parse(size.input_len), Lengths.parse(size.output_len)
    short = synthetic_workload(
        tokenizer,
        num_requests=size.num_slots,
        input_len=Lengths("fixed", input_len.low, input_len.low),
        output_len=Lengths("fixed", output_len.high, output_len.high),
        seed=seed,
    )
    long = synthetic_workload(
        tokenizer,
        num_requests=size.num_long_prompts,
        input_len=Lengths("fixed", size.long_prompt_len, size.long_prompt_len),
        output_len=Lengths("fixed", 4, 4),
        seed=seed + 1,
        origin="long_prompt_len",
    )
    apart = max(1, output_len.high // (size.num_long_prompts + 1))
    late = tuple(_late(item, apart * number) for number, item in enumerate(long.items, 1))
    return Workload(f"{len(short.items)} short prompts, {len(late)} long ones in between", short.items + late, seed)


def _late(item: WorkItem, num_steps: int) -> WorkItem:
    return dataclasses.replace(item, arrives_after_steps=num_steps)


def bench_ladder(
    config: EngineConfig,
    size: LadderOptions,
    *,
    repeats: int = 3,
    load: PartsLoader = load_real_parts,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Climb the ladder and return the report.

    Args:
        config: model, dtype, block size and threads; the rungs set the rest. dtype `auto` becomes float32.

    Raises:
        BenchmarkError: a run does not count, or two rungs disagree.
        InvalidConfigError: the sizes do not fit each other or the model, or the dtype is not one of all rungs.
    """
    ladder, climb = rungs(size, config.block_size), _Climb(_in_one_dtype(config), size, repeats, load, clock)
    skipped: dict[str, str] = {}
    for number, rung in enumerate(ladder, 1):
        title = f"{number} of {len(ladder)}: {rung.name}"
        logger.info("rung %s (%s)", title, rung.workload)
        try:
            climb.run(rung, Named(progress or NoProgress(), title))
        except KernelBuildError as error:
            skipped[f"{rung.name} ({rung.workload})"] = str(error)
            logger.warning("the rung %s is left out: %s", rung.name, error)
    settings = {"pool_tokens": size.num_slots * size.max_model_len, "block_size": config.block_size}
    header: dict[str, Any] = {**climb.header, **settings, "seed": size.seed, "repeats": repeats, "ignore_eos": True}
    header |= {"size": dataclasses.asdict(size), "skipped": skipped or None}
    header["prefix_cache_hit_tokens"] = sum(result["num_cached_tokens"] for result in climb.results)
    return {"benchmark": "ladder", "header": header, "results": climb.results}


def _in_one_dtype(config: EngineConfig) -> EngineConfig:
    """The config in a dtype that every rung can: float32 unless another is asked for."""
    if config.dtype == "auto":
        return dataclasses.replace(config, dtype="float32")
    if config.dtype not in _DTYPES:
        raise InvalidConfigError(
            f"all rungs of the ladder run in one dtype, {' or '.join(_DTYPES)}, got {config.dtype!r}; choose one of "
            "these, or leave --dtype out",
            field="dtype",
        )
    return config


class _Climb:
    """The rungs that are done, and what the next ones are compared with."""

    def __init__(
        self, config: EngineConfig, size: LadderOptions, repeats: int, load: PartsLoader, clock: Clock
    ) -> None:
        self._config = dataclasses.replace(
            config, max_model_len=size.max_model_len, max_num_seqs=max(size.num_requests, size.num_slots * 2)
        )
        self._size = size
        self._repeats = repeats
        self._load = load
        self._clock = clock
        self._workloads: dict[str, Workload] = {}
        self._references: dict[str, tuple[str, Answers]] = {}
        self.header: dict[str, Any] = {}
        self.results: list[dict[str, Any]] = []

    def run(self, rung: Rung, progress: Progress) -> None:
        """Measure a rung.

        Raises:
            BenchmarkError: a run does not count, or its answers differ from those of the rung before.
            InvalidConfigError: at the first rung, if a request of any is longer than max_model_len.
            KernelBuildError: it needs kernels that cannot be had.
        """
        if rung.options["kernels"] == "cpu" and (device := resolve_device(self._config.device)).type != "cpu":
            raise KernelBuildError(f"the C++ kernels compute on the CPU, and the ladder runs on {device}")
        bench = open_bench(dataclasses.replace(self._config, **rung.options), self._load, self._clock, progress)
        if not self._workloads:
            self._workloads = workloads(bench.engine.tokenizer, self._size)
            for one in self._workloads.values():  # all of them now, not each at its rung
                one.check_fits(self._size.max_model_len)
        workload = self._workloads[rung.workload]
        if rung.one_at_a_time:
            workload = workload.first(self._size.num_one_at_a_time)
        warm_up = workload.first(2).shortened(WARM_UP_TOKENS)
        runs = measure(bench, workload, repeats=self._repeats, warm_up=warm_up)
        ties = _differences(bench, rung, workload, runs[0].answers, self._references)
        self.results.append({"rung": rung.name, "workload": rung.workload, **_figures(runs), "num_differing": ties})
        self.header = self.header or {**machine(), "model": bench.engine.model_name, "dtype": bench.dtype}
        bench.engine.shutdown()


def _differences(
    bench: Bench, rung: Rung, workload: Workload, got: Answers, references: dict[str, tuple[str, Answers]]
) -> int:
    """How many answers differ from the rung before on this workload; in float32 only near ties may."""
    name, expected = references.get(rung.workload, (rung.name, got))
    references[rung.workload] = (rung.name, got)
    if bench.dtype != "float32":
        return sum(one != other for one, other in zip(expected, got, strict=False))
    return count_near_ties(bench, workload, expected, got, (name, rung.name))


def _figures(runs: list[RunRecord]) -> dict[str, Any]:
    speed = Spread.of([run.output_tokens_per_second for run in runs])
    requests = [request for run in runs for request in run.requests]
    gaps = [gap for request in requests for gap in request.gaps]
    # A worst gap is one event: the median over the runs says more than the worst of all.
    worst = [max((gap for request in run.requests for gap in request.gaps), default=0.0) for run in runs]
    return {
        "num_requests": len(runs[0].requests),
        "num_output_tokens": runs[0].num_output_tokens,
        "num_cached_tokens": runs[0].num_cached_tokens,
        "output_tokens_per_second": dataclasses.asdict(speed),
        "time_to_first_token": percentiles([request.time_to_first_token for request in requests]),
        "inter_token": percentiles(gaps),
        "worst_gap": statistics.median(worst),
        "peak_held_bytes": max(runs[0].held_bytes, default=0),
        "wasted_share": runs[0].wasted_share,
    }


LADDER_COLUMNS: Mapping[str, Callable[[dict[str, Any]], str]] = MappingProxyType(
    {
        "rung": lambda r: r["rung"],
        "workload": lambda r: r["workload"],
        "requests": lambda r: str(r["num_requests"]),
        "output tok/s": lambda r: Spread(**r["output_tokens_per_second"]).text(),
        "first token p50, s": lambda r: f"{r['time_to_first_token']['p50']:.2f}",
        "gap p50, ms": lambda r: f"{1e3 * r['inter_token'].get('p50', 0.0):.0f}",
        "worst gap, ms": lambda r: f"{1e3 * r['worst_gap']:.0f}",
        "held, MiB": lambda r: f"{r['peak_held_bytes'] / 2**20:.1f}",
        "wasted": lambda r: f"{r['wasted_share']:.0%}",
        "cached": lambda r: str(r["num_cached_tokens"]),
        "differ": lambda r: str(r["num_differing"]),
    }
)


def ladder_table(report: dict[str, Any]) -> Table:
    """The report for people."""
    rows = tuple(tuple(cell(result) for cell in LADDER_COLUMNS.values()) for result in report["results"])
    return Table("The ladder", tuple(LADDER_COLUMNS), rows)

"""`mini-vllm bench`: throughput, latency, and the ladder.

Where it stands: flags in, tables and files out; the measuring is in `benchmark/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.terminal import Quiet, Verbose, open_terminal
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError

_ENGINE = FlagGroup(EngineConfig, without=frozenset({"seed"}))
# What the rungs set themselves is no flag of the ladder.
_LADDER_ENGINE = FlagGroup(
    EngineConfig,
    without=frozenset(
        {
            *("seed", "cache", "scheduling", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
            *("num_kv_blocks", "kv_cache_memory", "kv_cache_memory_fraction"),
            *("enable_prefix_caching", "enable_chunked_prefill"),
        }
    ),
)

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the whole report there.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs after the warm-up; median and spread are of these.")]
Seed = Annotated[int, typer.Option(help="Of the random prompts and lengths.")]

bench = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure the engine: throughput, latency, ladder."
)


@bench.command()
@flags_from(engine=_ENGINE)
def throughput(
    num_prompts: Annotated[int, typer.Option(min=1, help="How many requests, all there from the start.")] = 64,
    input_len: Annotated[str, typer.Option(help="Prompt tokens: 128, 32-256, or chat:120 (log-normal).")] = "32-256",
    output_len: Annotated[str, typer.Option(help="Output tokens, written as --input-len.")] = "32-256",
    shared_prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    prompts_file: Annotated[
        Path | None, typer.Option(help='Instead: a JSON object a line, "prompt" and "max_tokens".')
    ] = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    engine: EngineConfig,
) -> None:
    """Tokens a second, all requests there from the start. Answers are greedy and go past the end of sequence.

    Example:

      mini-vllm bench throughput --num-prompts 64 --input-len chat:120 --output-len chat:80 --json throughput.json
    """
    from mini_vllm.benchmark.throughput import bench_throughput, throughput_table
    from mini_vllm.benchmark.workload import Lengths, Workload, read_prompts_file, synthetic_workload
    from mini_vllm.tokenizer.tokenizer import Tokenizer

    lengths_in, lengths_out = Lengths.parse(input_len), Lengths.parse(output_len)

    def make_workload(tokenizer: Tokenizer) -> Workload:
        if prompts_file is not None:
            return read_prompts_file(prompts_file, tokenizer, lengths_out, seed)
        return synthetic_workload(
            tokenizer,
            num_requests=num_prompts,
            input_len=lengths_in,
            output_len=lengths_out,
            shared_prefix_len=shared_prefix_len,
            seed=seed,
        )

    with open_terminal(verbose=verbose, quiet=quiet).busy("Measuring throughput"):
        report = bench_throughput(engine, make_workload, repeats=repeats)
    _deliver(report, throughput_table(report), json_file)


@bench.command()
@flags_from(engine=_ENGINE)
def latency(
    batch_sizes: Annotated[str, typer.Option(help="Requests at once, one run each.", metavar="N,N,...")] = "1,4,16,64",
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens of each request.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 64,
    repeats: Repeats = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    engine: EngineConfig,
) -> None:
    """Time to first token, between tokens, and to the end, at several batch sizes; and where a step's time goes.

    Example:

      mini-vllm bench latency --batch-sizes 1,8 --dtype bfloat16
    """
    from mini_vllm.benchmark.latency import bench_latency, latency_table

    with open_terminal(verbose=verbose, quiet=quiet).busy("Measuring latency"):
        report = bench_latency(
            engine,
            batch_sizes=_batch_sizes(batch_sizes),
            input_len=input_len,
            output_len=output_len,
            repeats=repeats,
            seed=seed,
        )
    _deliver(report, latency_table(report), json_file)


@bench.command()
@flags_from(engine=_LADDER_ENGINE)
def ladder(
    repeats: Repeats = 2,
    seed: Seed = 0,
    json_file: JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as Markdown.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart, .svg or .png.")] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    engine: EngineConfig,
) -> None:
    """What each idea buys: no cache, a cache, batches, continuous batching, paging, prefix cache, chunked prefill.

    All rungs must give the same tokens. It runs in float32 unless --dtype says otherwise, since in bfloat16 two nearly
    equal tokens may change places between batches of different shapes.
    """
    from mini_vllm.benchmark.ladder import LadderSize, bench_ladder, ladder_table
    from mini_vllm.benchmark.ladder_plot import plot_ladder, require_matplotlib

    if plot is not None:
        require_matplotlib()
    terminal = open_terminal(verbose=verbose, quiet=quiet)
    report = bench_ladder(engine, LadderSize(), repeats=repeats, seed=seed, say=terminal.note)
    table = ladder_table(report)
    _deliver(report, table, json_file)
    if markdown is not None:
        _write_markdown(markdown, table.markdown())
    if plot is not None:
        plot_ladder(report, plot)


def _batch_sizes(text: str) -> list[int]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InvalidConfigError(f"batch sizes are written 1,4,16, each 1 or more, got {text!r}", field="batch_sizes")
    return [int(size) for size in sizes]


def _deliver(report: dict[str, Any], table: Any, json_file: Path | None) -> None:
    from mini_vllm.benchmark.report import print_table, write_json

    print_table(table, report["header"])
    if json_file is not None:
        write_json(json_file, report)


def _write_markdown(path: Path, text: str) -> None:
    from mini_vllm.store.atomic_write import atomic_file

    try:
        with atomic_file(path) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(f"the table cannot be written to {path}: {error}", field="markdown") from error

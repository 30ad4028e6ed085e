"""`mini-vllm bench latency`.

In vLLM: `vllm/entrypoints/cli/benchmark/latency.py`.
"""

from __future__ import annotations

from mini_vllm.benchmark.options import LatencyOptions
from mini_vllm.commands.bench.shared import ENGINE_FLAGS, REPORT_FLAGS, ReportOptions, deliver
from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.terminal import Quiet, Verbose, open_terminal
from mini_vllm.config import EngineConfig


@flags_from(sweep=FlagGroup(LatencyOptions), report=REPORT_FLAGS, engine=ENGINE_FLAGS)
def latency(
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    sweep: LatencyOptions,
    report: ReportOptions,
    engine: EngineConfig,
) -> None:
    """Time to first token, between tokens, and to the end, over batch sizes and contexts; and where a step's time goes.

    Example:

      mini-vllm bench latency --batch-sizes 1,8 --input-len 128,1024 --dtype bfloat16
    """
    from mini_vllm.benchmark.latency import bench_latency, latency_table
    from mini_vllm.benchmark.progress import open_progress

    terminal = open_terminal(verbose=verbose, quiet=quiet)
    with open_progress(is_shown=terminal.shows_progress) as progress:
        result = bench_latency(engine, sweep, repeats=report.repeats, progress=progress)
    deliver(result, latency_table(result), report)

"""`mini-vllm bench throughput`.

In vLLM: `vllm/entrypoints/cli/benchmark/throughput.py`.
"""

from __future__ import annotations

import functools

from mini_vllm.benchmark.options import WorkloadOptions
from mini_vllm.commands.bench.shared import ENGINE_FLAGS, REPORT_FLAGS, ReportOptions, deliver
from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.terminal import Quiet, Verbose, open_terminal
from mini_vllm.config import EngineConfig


@flags_from(workload=FlagGroup(WorkloadOptions), report=REPORT_FLAGS, engine=ENGINE_FLAGS)
def throughput(
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    workload: WorkloadOptions,
    report: ReportOptions,
    engine: EngineConfig,
) -> None:
    """Tokens a second, all requests there from the start. Answers are greedy and go past the end of sequence.

    Example:

      mini-vllm bench throughput --num-prompts 64 --input-len chat:120 --output-len chat:80 --json throughput.json
    """
    from mini_vllm.benchmark.progress import open_progress
    from mini_vllm.benchmark.throughput import bench_throughput, throughput_table
    from mini_vllm.benchmark.workload_files import make_workload

    terminal = open_terminal(verbose=verbose, quiet=quiet)
    with open_progress(is_shown=terminal.shows_progress) as progress:
        result = bench_throughput(
            engine, functools.partial(make_workload, workload), repeats=report.repeats, progress=progress
        )
    deliver(result, throughput_table(result), report)

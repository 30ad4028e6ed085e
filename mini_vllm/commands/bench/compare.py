"""`mini-vllm bench compare`.

In vLLM: nothing.
"""

from __future__ import annotations

from mini_vllm.benchmark.options import SET_BY_COMPARE, CompareOptions, WorkloadOptions
from mini_vllm.commands.bench.shared import REPORT_FLAGS, ReportOptions, deliver
from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.terminal import Quiet, Verbose, open_terminal
from mini_vllm.config import EngineConfig


@flags_from(
    others=FlagGroup(CompareOptions),
    workload=FlagGroup(WorkloadOptions),
    report=REPORT_FLAGS,
    engine=FlagGroup(EngineConfig, without=SET_BY_COMPARE),
)
def compare(
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    others: CompareOptions,
    workload: WorkloadOptions,
    report: ReportOptions,
    engine: EngineConfig,
) -> None:
    """This engine and others on one workload, one after the other in fresh processes, as ratios.

    Example:

      mini-vllm bench compare --peer vllm=/opt/vllm/bin/python --peer transformers=/opt/hf/bin/python

      mini-vllm bench compare --peer "vllm=env LD_PRELOAD=/usr/lib/libtcmalloc.so.4 /opt/vllm/bin/python"
    """
    from mini_vllm.benchmark.compare import bench_compare, compare_table, failures
    from mini_vllm.benchmark.progress import open_progress
    from mini_vllm.benchmark.records import BenchmarkError

    terminal = open_terminal(verbose=verbose, quiet=quiet)
    with open_progress(is_shown=terminal.shows_progress) as progress:
        result = bench_compare(engine, others, workload, repeats=report.repeats, progress=progress)
    deliver(result, compare_table(result), report)
    if failed := failures(result):
        raise BenchmarkError(f"no figures from {', '.join(failed)}; the reason stands below the table")

"""`mini-vllm bench ladder`.

In vLLM: nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mini_vllm.benchmark.options import SET_BY_RUNGS, LadderOptions
from mini_vllm.commands.bench.shared import REPORT_FLAGS, ReportOptions, deliver, require_writable
from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.terminal import Quiet, Verbose, open_terminal
from mini_vllm.config import EngineConfig


@flags_from(
    size=FlagGroup(LadderOptions),
    report=REPORT_FLAGS,
    engine=FlagGroup(EngineConfig, without=SET_BY_RUNGS),
)
def ladder(
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a chart, .svg, .png or .pdf.")] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    size: LadderOptions,
    report: ReportOptions,
    engine: EngineConfig,
) -> None:
    """What each idea buys: no cache, a cache, batches, continuous batching, paging, prefix cache, chunked prefill.

    All rungs must give the same tokens. It runs in float32 unless --dtype says otherwise, since in bfloat16 two nearly
    equal tokens may change places between batches of different shapes.
    """
    from mini_vllm.benchmark.ladder import bench_ladder, ladder_table
    from mini_vllm.benchmark.ladder_plot import chart_format, plot_ladder
    from mini_vllm.benchmark.progress import open_progress

    if plot is not None:
        chart_format(plot)
        require_writable("plot", plot)
    terminal = open_terminal(verbose=verbose, quiet=quiet)
    with open_progress(is_shown=terminal.shows_progress) as progress:
        result = bench_ladder(engine, size, repeats=report.repeats, progress=progress)
    deliver(result, ladder_table(result), report)
    if plot is not None:
        plot_ladder(result, plot)

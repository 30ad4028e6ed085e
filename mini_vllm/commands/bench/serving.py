"""`mini-vllm bench serving`.

In vLLM: `vllm/entrypoints/cli/benchmark/serve.py`.
"""

from __future__ import annotations

from mini_vllm.benchmark.options import ServingOptions, WorkloadOptions
from mini_vllm.commands.bench.shared import REPORT_FLAGS, ReportOptions, deliver
from mini_vllm.commands.dataclass_flags import FlagGroup, flags_from
from mini_vllm.commands.terminal import Quiet, Verbose, open_terminal


@flags_from(load=FlagGroup(ServingOptions), workload=FlagGroup(WorkloadOptions), report=REPORT_FLAGS)
def serving(
    verbose: Verbose = False,
    quiet: Quiet = False,
    *,
    load: ServingOptions,
    workload: WorkloadOptions,
    report: ReportOptions,
) -> None:
    """Load on a running server, over HTTP: what its clients wait at given rates, and how many are served well.

    Example:

      mini-vllm serve &

      mini-vllm bench serving --request-rate 1,2,4 --num-prompts 40 --ttft-limit 1 --tpot-limit 0.1
    """
    from mini_vllm.benchmark.progress import open_progress
    from mini_vllm.benchmark.serving import bench_serving, serving_table
    from mini_vllm.store.model_store import resolve_model
    from mini_vllm.tokenizer.tokenizer import load_tokenizer

    terminal = open_terminal(verbose=verbose, quiet=quiet)
    tokenizer = load_tokenizer(resolve_model(load.tokenizer))
    with open_progress(is_shown=terminal.shows_progress) as progress:
        result = bench_serving(load, workload, tokenizer, repeats=report.repeats, progress=progress)
    deliver(result, serving_table(result), report)

"""`mini-vllm bench`: throughput, latency, serving, the ladder, and other engines.

Where it stands: flags in, tables and files out; the measuring is in `benchmark/`. One file a benchmark; what they share
is in `shared.py`.

In vLLM: `vllm/entrypoints/cli/benchmark/`.
"""

from __future__ import annotations

import typer

from mini_vllm.commands.bench.compare import compare
from mini_vllm.commands.bench.ladder import ladder
from mini_vllm.commands.bench.latency import latency
from mini_vllm.commands.bench.serving import serving
from mini_vllm.commands.bench.throughput import throughput
from mini_vllm.commands.dataclass_flags import FLAGS_FROM_ENVIRONMENT

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure the engine: throughput, latency, serving over HTTP, the ladder of its ideas, other engines.",
)
for command in (throughput, latency, serving, ladder, compare):
    bench.command(context_settings=FLAGS_FROM_ENVIRONMENT)(command)

"""What the benchmarks' commands share: the flags of a report, and what is done with one.

Where it stands: between the commands of `bench` and `benchmark/report.py`.

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_vllm.commands.dataclass_flags import FlagGroup
from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError
from mini_vllm.store.atomic_write import try_file

if TYPE_CHECKING:
    from mini_vllm.benchmark.report import Table

# The seed of a benchmark is that of its prompts; sampling is greedy, so the engine's would change nothing.
ENGINE_FLAGS = FlagGroup(EngineConfig, without=frozenset({"seed"}))


@dataclass(frozen=True)
class ReportOptions:
    """How often to measure, and where the report goes beside the table on standard output. The files can be written.

    Args:
        repeats: runs after the warm-up; the median and the spread are of these.
        json: write the whole report to this file.
        markdown: write the table as Markdown to this file.
    """

    repeats: int = 3
    json: str | None = None
    markdown: str | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InvalidConfigError(f"repeats must be 1 or more, got {self.repeats}", field="repeats")
        if self.json is not None and self.json == self.markdown:
            raise InvalidConfigError(f"json and markdown are both {self.json}; give two files", field="markdown")
        for name in ("json", "markdown"):
            if (file := getattr(self, name)) is not None:
                require_writable(name, Path(file))


def require_writable(field: str, file: Path) -> None:
    """Say at the start, and not after minutes of measuring, that a file cannot be written.

    Raises:
        InvalidConfigError: it cannot.
    """
    try:
        try_file(file)
    except OSError as error:
        raise InvalidConfigError(
            f"{field} cannot be written to {file}: {error.strerror or error}; choose another file", field=field
        ) from error


REPORT_FLAGS = FlagGroup(ReportOptions)


def deliver(report: Mapping[str, Any], table: Table, options: ReportOptions) -> None:
    """Show the table, and write the files that were asked for.

    Raises:
        InvalidConfigError: a file cannot be written.
    """
    from mini_vllm.benchmark.report import print_table, write_json, write_markdown

    print_table(table, report["header"])
    if options.json is not None:
        write_json(Path(options.json), report)
    if options.markdown is not None:
        write_markdown(Path(options.markdown), table, report["header"])

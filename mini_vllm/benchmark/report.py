"""Reports: medians, percentiles, the header, and the three forms of a result (table, JSON, Markdown).

Where it stands: after the runs. It computes from what was recorded and measures nothing itself.

What always holds: no figure goes without its header: machine, threads, versions, dtype, pool, seed, prefix-cache hits.

In vLLM: `vllm/benchmarks/lib/utils.py`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm.errors import InvalidConfigError
from mini_vllm.store.atomic_write import atomic_file

PERCENTILES = (50, 90, 99)
_WIDEST = 1000  # columns of a table in a file


@dataclass(frozen=True)
class Spread:
    """Several runs' values of one figure."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 1) -> str:
        """`736.1 (730.0 to 741.5)`; the median alone where there was one run."""
        if self.low == self.high:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`p50`, `p90`, `p99`, between neighbours by straight lines; empty for no values."""
    if not values:
        return {}
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}


def percentile_cell(values: Mapping[str, float]) -> str:
    """`12.1 / 14.0 / 15.2`: the percentiles of some seconds, in milliseconds."""
    return " / ".join(f"{1e3 * value:.1f}" for value in values.values()) or "-"


def processor() -> dict[str, Any]:
    """What runs this process."""
    return {
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "mini_vllm": _own_version(),
    }


def machine() -> dict[str, Any]:
    """What the figures of a model in this process were measured on."""
    import torch

    return {
        **processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _own_version() -> str:
    from importlib.metadata import version

    return version("mini-vllm")


def _processor_name() -> str:
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report, whole or not at all.

    Raises:
        InvalidConfigError: the file cannot be written.
    """
    try:
        with atomic_file(path) as unfinished:
            unfinished.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(f"the report cannot be written to {path}: {error}", field="json") from error


def write_markdown(path: Path, table: Table, header: Mapping[str, Any]) -> None:
    """Write the table, with the header as a line below it.

    Raises:
        InvalidConfigError: the file cannot be written.
    """
    try:
        with atomic_file(path) as unfinished:
            unfinished.write_text(f"{table.markdown()}\n{header_line(header)}\n", encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(f"the table cannot be written to {path}: {error}", field="markdown") from error


@dataclass(frozen=True)
class Table:
    """A table for people.

    Args:
        columns: the first one names the row.
        notes: lines below the table, for what is too long for a cell.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.columns) + " |", "|---" + "|---:" * (len(self.columns) - 1) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)]) + "\n"


def header_line(header: Mapping[str, Any]) -> str:
    """The header as text: `processor=..., cores=2, ...`; what is None is left out."""
    return ", ".join(f"{name}={value}" for name, value in header.items() if value is not None)


def print_table(table: Table, header: Mapping[str, Any]) -> None:
    """Header and table on standard output."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False, markup=False)
    console.print(header_line(header))
    shown = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        shown.add_row(*row)
    if not console.is_terminal:  # a file has no edge at which cells would have to be folded
        console.width = max(
            console.width, shown.__rich_measure__(console, console.options.update(max_width=_WIDEST)).maximum
        )
    console.print(shown)
    for note in table.notes:
        console.print(note, soft_wrap=True)

"""The ladder as a chart: tokens a second, memory, and the worst gap, a bar a rung.

Where it stands: `mini-vllm bench ladder --plot FILE.svg`; the only place that needs matplotlib (the extra `plot`).

In vLLM: nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mini_vllm.errors import InvalidConfigError

_COLOURS = ("#4477aa", "#228833", "#aa3377")  # of the three workloads; distinct also for the colour-blind


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def require_matplotlib() -> None:
    """Say at the start, and not after minutes of measuring, that the chart cannot be drawn.

    Raises:
        InvalidConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidConfigError(
            "--plot needs matplotlib: pip install 'mini-vllm[plot]', or leave --plot out", field="plot"
        ) from error


def plot_ladder(report: dict[str, Any], path: Path) -> None:
    """Draw the report; the file's ending says the format (`.svg`, `.png`).

    Raises:
        InvalidConfigError: matplotlib is not installed, or the file cannot be written.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    results = report["results"]
    workloads = list(dict.fromkeys(result["workload"] for result in results))
    results = sorted(results, key=lambda result: workloads.index(result["workload"]))  # stable: rungs keep their order
    names = [f"{result['rung']}\n({result['workload']})" for result in results]
    colours = [_COLOURS[workloads.index(result["workload"]) % len(_COLOURS)] for result in results]
    held = [result["peak_held_bytes"] / 2**20 for result in results]
    panels = {
        "output tokens a second": [result["output_tokens_per_second"]["median"] for result in results],
        "keys and values held at the peak, MiB\n(hatched: the share that holds no token)": held,
        "worst gap between two tokens, ms": [1e3 * result["worst_gap"] for result in results],
    }
    figure = Figure(figsize=(14, 0.55 * len(results) + 1.5), layout="constrained")
    for place, (title, values) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(1, len(panels), place)
        axes.bar_label(axes.barh(names, values, color=colours), fmt=_short, padding=3)
        if values is held:
            wasted = [value * result["wasted_share"] for value, result in zip(held, results, strict=True)]
            axes.barh(names, wasted, color=colours, hatch="///", edgecolor="white")
        axes.invert_yaxis()
        axes.margins(x=0.15, y=0.01)
        axes.set_title(title)
        if place > 1:
            axes.set_yticklabels([])
    # Without a date and with fixed names the same report gives the same file, and a repository sees real changes only.
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "ladder"}):
            figure.savefig(path, metadata=metadata)
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"the chart cannot be written to {path}: {error}", field="plot") from error

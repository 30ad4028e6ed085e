"""The ladder as a chart: tokens a second, memory, and the worst gap, a bar a rung.

Where it stands: `mini-vllm bench ladder --plot FILE.svg`; the only place that needs matplotlib (the extra `plot`).

In vLLM: nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mini_vllm.errors import InvalidConfigError
from mini_vllm.store.atomic_write import atomic_file

_COLOURS = ("#4477aa", "#228833", "#aa3377")  # of the three workloads; distinct also for the colour-blind


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def chart_format(path: Path) -> str:
    """The format that a file's ending says. Asked at the start, and not after minutes of measuring.

    Raises:
        InvalidConfigError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib import figure
    except ImportError as error:
        raise InvalidConfigError(
            "--plot needs matplotlib: pip install 'mini-vllm[plot]', or leave --plot out", field="plot"
        ) from error
    name, known = path.suffix[1:].lower(), sorted(figure.Figure().canvas.get_supported_filetypes())
    if name not in known:
        raise InvalidConfigError(
            f"the ending of plot's file is its format, one of {', '.join(known)}; got {path.name!r}", field="plot"
        )
    return name


def plot_ladder(report: dict[str, Any], path: Path) -> None:
    """Draw the report; the file's ending says the format, such as `.svg`.

    Raises:
        InvalidConfigError: as `chart_format`, or the file cannot be written.
    """
    name = chart_format(path)
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
    metadata = {"Date": None} if name == "svg" else {}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "ladder"}), atomic_file(path) as unfinished:
            figure.savefig(unfinished, format=name, metadata=metadata)
    except OSError as error:
        raise InvalidConfigError(f"the chart cannot be written to {path}: {error}", field="plot") from error

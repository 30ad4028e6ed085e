"""What a pull shows while it goes: a bar on a terminal, one line before and one after everywhere else.

Where it stands: used by the two ways to fetch a model. All of it goes to stderr, so that stdout carries answers only.

In vLLM: nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def announce(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar, gone when the block ends.

    Args:
        title: what is fetched.
        total_bytes: how much it will be.

    Yields:
        A function that takes the number of bytes so far. Without a terminal it does nothing.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(file=sys.stderr), transient=True) as display:
        task = display.add_task(title, total=total_bytes)
        yield lambda so_far: display.update(task, completed=so_far)

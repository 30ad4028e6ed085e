"""The progress bar of a benchmark, on stderr and on a terminal only.

Where it stands: beside the runner, which says what it begins and how many tokens have come back. The bar is drawn a few
times a second by a thread of its own; a draw takes about a millisecond, which is why nothing is drawn at every step.

In vLLM: nothing; tqdm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

DRAWS_PER_SECOND = 4


class Progress(Protocol):
    """Told how a benchmark goes on."""

    def begin(self, title: str, total: int) -> None:
        """A run begins that will bring back so many tokens."""
        ...

    def advance(self, count: int) -> None:
        """So many more are there."""
        ...


class NoProgress:
    """Shows nothing."""

    def begin(self, title: str, total: int) -> None: ...

    def advance(self, count: int) -> None: ...


class Named:
    """The same bar, with something before each title.

    Args:
        progress: that is told.
        name: what goes before.
    """

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name

    def begin(self, title: str, total: int) -> None:
        self._progress.begin(f"{self._name}, {title}", total)

    def advance(self, count: int) -> None:
        self._progress.advance(count)


class BarProgress:
    """One bar, used again by every run."""

    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def begin(self, title: str, total: int) -> None:
        self._bar.reset(self._task, description=title, total=total)

    def advance(self, count: int) -> None:
        self._bar.advance(self._task, count)


@contextmanager
def open_progress(*, is_shown: bool) -> Iterator[Progress]:
    """The bar, gone again at the end of the block; nothing where it would not be seen."""
    if not is_shown:
        yield NoProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, refresh_per_second=DRAWS_PER_SECOND
    ) as bar:
        yield BarProgress(bar, bar.add_task("starting", total=None))

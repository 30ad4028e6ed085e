"""What a command shows beside its answers, all of it on stderr.

Where it stands: every command that runs a model makes one `Terminal` first.

                              stdout is a terminal     stdout is a pipe or a file
    errors, pulls             yes                      yes
    warnings                  yes, unless --quiet      yes, unless --quiet
    figures, notes, spinner   yes, unless --quiet      no, unless --verbose
    the log                   with --verbose           with --verbose

In vLLM: nothing; `vllm/logger.py` for the log.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, TextIO

import typer

from mini_vllm.errors import InvalidConfigError

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the engine's log and the figures on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show answers and errors, no figures, notes or warnings.")]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Terminal:
    """The words of a command to the person in front of it.

    Args:
        shows_notes: whether figures and notes are wanted.
        has_colour: whether stderr is a terminal.
    """

    shows_notes: bool
    has_colour: bool

    @property
    def shows_progress(self) -> bool:
        """Whether something that moves is wanted, and can be drawn."""
        return self.shows_notes and self.has_colour

    def note(self, text: str) -> None:
        """A line that can be missed: figures, hints."""
        if self.shows_notes:
            print(f"{_DIM}{text}{_PLAIN}" if self.has_colour else text, file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """What must not be missed, or was asked for."""
        print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """What went wrong, in one line."""
        print_error(text)

    @contextlib.contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner while the block runs, on a terminal only."""
        if not self.shows_progress:
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield


def open_terminal(*, verbose: bool, quiet: bool) -> Terminal:
    """Decide what is shown, and send the log of mini vLLM to stderr.

    Raises:
        InvalidConfigError: it shall be both.
    """
    if verbose and quiet:
        raise InvalidConfigError("--verbose shows more and --quiet shows less; leave one out", field="quiet")
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter())
    logger = logging.getLogger("mini_vllm")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING)
    return Terminal(shows_notes=verbose or (sys.stdout.isatty() and not quiet), has_colour=sys.stderr.isatty())


def print_error(text: str) -> None:
    """`error: ...` on stderr, always one line."""
    print(f"error: {' '.join(text.splitlines())}", file=sys.stderr, flush=True)


class _ClosedStream(io.TextIOBase):
    """Stands for a standard output that was closed (`>&-`), for which Python has None: writing to it fails."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, f"cannot write to standard output: {os.strerror(errno.EBADF)}")


def with_all_streams() -> None:
    """See to it that stdin, stdout and stderr are there, also where the caller has closed one of them."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  (open as long as the process)
    if sys.stdout is None:
        sys.stdout = _ClosedStream()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def drop_output() -> None:
    """What is still in the buffer of stdout cannot be written: keep Python from trying it once more at its end."""
    with contextlib.suppress(OSError, ValueError):  # there may be no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def use_utf8(*streams: TextIO) -> None:
    """Pipes and files are UTF-8; a terminal keeps its own encoding. What cannot be read or shown is replaced."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):  # a stream that is closed, or a test's own, stays as it is
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")


class _LogFormatter(logging.Formatter):
    """`warning: ...`; the time in front where the log tells how the start went on."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno >= logging.WARNING:
            return f"{record.levelname.lower()}: {text}"
        return f"{self.formatTime(record, '%H:%M:%S')} {text}"

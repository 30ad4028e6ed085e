"""Files and folders that appear whole or not at all.

    target.parent/.NAME.unfinished-1f0c...   written here, hidden, then flushed to the disk
    target.parent/NAME                       renamed to here, in one step

Where it stands: below everything that keeps data on disk: pulled models, converted tokenizers and weights.

What always holds:
1. Whoever finds the target finds all of it, also after a crash, a Ctrl-C, a full disk or a power cut at any moment.
2. Two processes that make the same target at once do not harm each other: each works in a place of its own, and both
   end with a whole target. No lock is needed, and none can be left behind.
3. An error inside the `with` block leaves nothing. What a killed process left is removed by the next writer of the same
   target, once it is a day old.

In vLLM: nothing.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = ".unfinished-"
_LEFTOVER_AGE = 24 * 3600.0  # seconds; a pull that still runs has written something more recently


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Write a file: yields the path to write to, and renames it to `target` at the end.

    A file that is there already is replaced.

    Args:
        target: the final path; missing parent folders are made.
    """
    unfinished = _unfinished_path(target)
    try:
        yield unfinished
        _flush(unfinished)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    _flush_folder(target.parent)


def try_file(target: Path) -> None:
    """See whether `atomic_file` could write this file, before the work is done that it shall hold.

    An empty file is made where the unfinished one would be, or in the nearest folder that is there, and removed. The
    target itself is not touched.

    Raises:
        OSError: it could not; so also where something stands that is no file, such as a folder or a device.
    """
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "it is there and is no file", str(target))
    folder = next(folder for folder in target.absolute().parents if folder.exists())
    trial = _unfinished_name(folder / target.name)
    trial.touch(exist_ok=False)
    trial.unlink()


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Fill a folder: yields an empty folder to write into, and renames it to `target` at the end.

    A folder that is there already is kept and the new one dropped: it was completed by another process meanwhile, and
    may be in use.

    Args:
        target: the final path; missing parent folders are made.
    """
    unfinished = _unfinished_path(target)
    unfinished.mkdir()
    try:
        yield unfinished
        for path in unfinished.rglob("*"):
            if path.is_file():
                _flush(path)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _flush_folder(target.parent)


def _unfinished_path(target: Path) -> Path:
    """A new name beside the target, so that the rename stays within one file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    return _unfinished_name(target)


def _unfinished_name(target: Path) -> Path:
    return target.with_name(f".{target.name}{_MARK}{uuid.uuid4().hex}")


def _remove_leftovers(target: Path) -> None:
    """Remove what killed writers of this target left, so that it does not fill the disk."""
    prefix = f".{target.name}{_MARK}"
    for path in target.parent.iterdir():
        if path.name.startswith(prefix) and time.time() - _last_change(path) > _LEFTOVER_AGE:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _last_change(path: Path) -> float:
    """The newest modification time in a folder or of a file; now, if it vanishes while we look."""
    try:
        return max(entry.stat().st_mtime for entry in [path, *path.rglob("*")])
    except OSError:
        return time.time()


def _flush(path: Path) -> None:
    """Have the content on the disk before the rename: else a power cut could leave the name with nothing behind it."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Have the rename itself on the disk. Only POSIX systems can flush a folder; others need no such call."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

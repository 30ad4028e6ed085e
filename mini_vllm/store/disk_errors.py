"""What a full or read-only disk means for a pull, said so that the user can act on it.

Where it stands: around everything that `pypi_wheel.py` and `huggingface.py` write. Room is checked twice: before the
first byte is fetched, since a message then is better than one after ten minutes, and at each write, since others fill
the disk meanwhile.

In vLLM: nothing.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mini_vllm.errors import DownloadError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_HOME_HINT = "or set MINI_VLLM_HOME to a folder on another disk"


@contextmanager
def writing_into(folder: Path, needed_bytes: int, what: str) -> Iterator[None]:
    """Make the folder, check that there is room, and turn errors of the disk into `DownloadError`.

    Args:
        folder: where the block writes.
        needed_bytes: the most that is on the disk at one time.
        what: the model's name.

    Raises:
        DownloadError: no room (with both numbers), or the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if free_bytes(folder) < needed_bytes:
            raise disk_full(folder, needed_bytes, what)
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise disk_full(folder, needed_bytes, what) from error
        raise DownloadError(
            f"{what} could not be written into {folder}: {error}. Make that folder writable, {_HOME_HINT}."
        ) from error


def is_disk_error(error: Exception) -> bool:
    """Whether an error is the disk's. Errors of the network are OSErrors too, but they name no file."""
    return isinstance(error, OSError) and (error.filename is not None or error.errno in _NO_ROOM)


def disk_full(folder: Path, needed_bytes: int, what: str) -> DownloadError:
    """The error for a disk without room; nothing of the model is kept."""
    return DownloadError(
        f"Not enough room on the disk for {what}: {needed_bytes:,} bytes are needed in {folder}, "
        f"{free_bytes(folder):,} are free. Free some, {_HOME_HINT}."
    )


def free_bytes(folder: Path) -> int:
    """The bytes that this user may still write on the folder's disk."""
    return shutil.disk_usage(folder).free

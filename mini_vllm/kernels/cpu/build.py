"""The kernels' library: built once for this machine, kept, and loaded into PyTorch.

Where it stands: called at start-up, before the model is made ready. Everything that can go wrong here is a reason to
run on the reference path, so it is an error that says why, and only `kernels="cpu"` makes it fatal.

    sources, flags, versions, processor -> a key -> <home>/kernels/<key>/mini_vllm_cpu.so
                                                    there: load it          (milliseconds)
                                                    not there: compile it   (half a minute, once)
                                                    <key>.failed: this compiler failed on it; say so at once

What always holds: a library that is found is whole. It is compiled in a folder of its own and renamed, so a build that
was killed leaves nothing that a later one would trip over, and two processes may build at once. A compiler that failed
is not tried again at every start; another one is, or another version of it, and so is one that is demanded.

In vLLM: `cmake/cpu_extension.cmake`; there the kernels are built when the package is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import torch

from mini_vllm.errors import KernelBuildError
from mini_vllm.store.atomic_write import atomic_directory, atomic_file

logger = logging.getLogger(__name__)

LIBRARY = "mini_vllm_cpu.so"
FLAGS_VARIABLE = "MINI_VLLM_CPU_FLAGS"  # instead of -march=native: "-march=x86-64-v3", or "" for no vectors at all
_SOURCES = Path(__file__).parent / "csrc"
# OpenMP is compiled for but not linked to: the symbols are found in the library that PyTorch brings and has loaded.
# With a second copy of it there would be two pools of threads that fight for the same cores.
_COMPILE = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-DAT_PARALLEL_OPENMP=1", "-Wno-psabi", "-Wno-ignored-attributes"),
    # Products and sums are fused where the source says so and nowhere else. Left to itself the compiler fuses in one
    # copy of an inlined function and not in another, and a row's bits would depend on how many rows stand beside it.
    "-ffp-contract=off",
)
_BUILD_LIMIT = 600.0  # seconds


def load_kernels(home: Path, *, is_demanded: bool = True) -> None:
    """Make `torch.ops.mini_vllm_cpu` available, building the library if this machine has none yet.

    Args:
        home: folder under which libraries are kept.
        is_demanded: build also where the same compiler has failed before.

    Raises:
        KernelBuildError: there is no compiler, the build failed (now or before), or the library does not load.
    """
    if kernels_are_loaded():
        return
    folder = home / "kernels" / _key()
    if not (folder / LIBRARY).exists():
        if not is_demanded and (reason := known_failure(home)) is not None:
            raise KernelBuildError(reason)
        _build_or_note(folder)
    try:
        torch.ops.load_library(folder / LIBRARY)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelBuildError(
            f"{folder / LIBRARY} does not load: {error}; delete {folder} to build it anew"
        ) from error


def kernels_are_built(home: Path) -> bool:
    """Whether this machine has a library for these sources, so that loading takes milliseconds."""
    return (home / "kernels" / _key() / LIBRARY).exists()


def known_failure(home: Path) -> str | None:
    """Why an earlier start could not build the kernels, if the compiler is still the one that failed.

    Raises:
        KernelBuildError: there is no compiler at all.
    """
    compiler = find_compiler()
    try:
        name, _, reason = _note_of(home / "kernels" / _key()).read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):  # no note, or none that says anything
        return None
    if name != _version_of(compiler):
        return None
    return f"{reason} (so it was at an earlier start; kernels='cpu' or another compiler in CXX tries again)"


def kernels_are_loaded() -> bool:
    """Whether this process has the operators already. They are registered once and stay."""
    return hasattr(torch.ops.mini_vllm_cpu, "paged_attention")


def machine_flags() -> tuple[str, ...]:
    """Compiler flags that choose the instruction set.

    Raises:
        KernelBuildError: what the variable holds cannot be read.
    """
    return tuple(_words_of(FLAGS_VARIABLE, "-march=native"))


def _words_of(variable: str, otherwise: str) -> list[str]:
    """What an environment variable holds, split as a shell would."""
    text = os.environ.get(variable, otherwise)
    try:
        return shlex.split(text)
    except ValueError as error:
        raise KernelBuildError(f"{variable} cannot be read: {error}; got {text!r}") from None


def _key() -> str:
    """Changes with everything that the library depends on, save the compiler, which may be gone by the next start."""
    digest = hashlib.sha256()
    parts = [torch.__version__, platform.machine(), _processor(), *_COMPILE, *machine_flags()]
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What tells processors apart: a home folder may be shared by machines that differ."""
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.exists():
        return platform.processor()
    lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def find_compiler() -> list[str]:
    """The command of the C++ compiler: `CXX`, which may have arguments, else `c++`.

    Raises:
        KernelBuildError: there is none, or `CXX` cannot be read.
    """
    wanted = _words_of("CXX", "") or ["c++"]
    compiler = shutil.which(wanted[0])
    if compiler is None:
        raise KernelBuildError(f"there is no C++ compiler ({wanted[0]}); install g++ or set CXX to yours")
    return [compiler, *wanted[1:]]


def _version_of(compiler: list[str]) -> str:
    """One line that changes with the compiler's command and version."""
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return " ".join(compiler)
    return " ".join([*compiler, *done.stdout.split()])


def _note_of(folder: Path) -> Path:
    """Where it stands that a library could not be built: the compiler in the first line, the reason behind it."""
    return folder.with_name(f"{folder.name}.failed")


def _build_or_note(folder: Path) -> None:
    compiler, note = find_compiler(), _note_of(folder)
    try:
        _build(folder, compiler)
        note.unlink(missing_ok=True)
    except OSError as error:
        raise KernelBuildError(f"the kernels cannot be kept under {folder.parent}: {error}") from error
    except KernelBuildError as error:
        with contextlib.suppress(OSError), atomic_file(note) as unfinished:  # without a note it is tried again
            unfinished.write_text(f"{_version_of(compiler)}\n{error}", encoding="utf-8")
        raise


def _build(folder: Path, compiler: list[str]) -> None:
    # Imported late: this module of PyTorch loads slowly, and only a build needs it.
    from torch.utils.cpp_extension import include_paths, library_paths

    logger.warning("building the fast kernels for this processor, once: about half a minute")
    started = time.monotonic()
    with atomic_directory(folder) as unfinished:
        object_file, library = unfinished / "ops.o", unfinished / LIBRARY
        includes = [f"-isystem{path}" for path in include_paths()]
        _run(
            [*compiler, *_COMPILE, *machine_flags(), *includes, "-c", str(_SOURCES / "ops.cpp"), "-o", str(object_file)]
        )
        libraries = [f"-L{path}" for path in library_paths()]
        _run([*compiler, "-shared", str(object_file), "-o", str(library), *libraries, "-ltorch_cpu", "-lc10"])
        object_file.unlink()
    logger.info("the kernels were built in %.0f s: %s", time.monotonic() - started, folder)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the kernels cannot be compiled: {error}") from error
    if done.returncode != 0:
        first_error = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[-500:])
        raise KernelBuildError(f"the kernels do not compile with {command[0]}: {first_error.strip()}")

"""`mini-vllm doctor`: what is here, what would be used and why, and whether a model could run.

Where it stands: it asks the functions that the engine asks at its start, so what it says is what would happen. It
reads and computes a little, but downloads and changes nothing.

In vLLM: `vllm/collect_env.py`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import typer

from mini_vllm.commands.models import models
from mini_vllm.commands.pull import format_bytes
from mini_vllm.commands.terminal import print_error
from mini_vllm.config import DEFAULT_MODEL, EngineConfig
from mini_vllm.store.model_store import KNOWN_MODELS, home, list_models

if TYPE_CHECKING:
    import torch

Rows: TypeAlias = list[tuple[str, str]]

_PACKAGES = ("mini-vllm", "torch", "numpy", "tokenizers", "safetensors", "gguf", "huggingface_hub", "jinja2")
# Of the hundred names a processor has, those that make a model faster: vectors, products of integers, of bfloat16.
_FEATURES_THAT_COUNT = (
    *("avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_NEEDED_MEMORY = 2**30  # bytes that the default model takes: PyTorch, the weights while they load, keys and values


def doctor() -> None:
    """Show what is here and what would be used.

    Versions, processor, memory, GPU, the model store; then device, dtype and attention, with the reason.

    The exit code is 0 when a model could run here, else 1.
    """
    problems: list[str] = []
    for title, section in (("Versions", _versions), ("Machine", _machine), ("Store", _store), ("Plan", _plan)):
        print(title)
        _print_section(section, problems)
    print("Models")
    models()
    for problem in problems:
        print_error(problem)
    if problems:
        raise typer.Exit(1)
    print("A model can run here.")


def _print_section(section: Callable[[list[str]], Rows], problems: list[str]) -> None:
    try:
        rows = section(problems)
    except (ImportError, OSError) as error:  # a broken PyTorch fails in either way; the other sections still help
        problems.append(f"{type(error).__name__}: {error}")
        rows = []
    for name, value in rows:
        print(f"  {name:<18}{value}")


def _versions(problems: list[str]) -> Rows:
    rows = [("python", f"{platform.python_version()} on {platform.platform()}")]
    for package in _PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, "missing"))
            problems.append(f"the package {package} is not installed; pip install -e . brings it")
    return rows


def _machine(problems: list[str]) -> Rows:
    import torch

    from mini_vllm.model.dtype import processor_features
    from mini_vllm.worker.memory import free_memory

    features = processor_features()
    free, total = free_memory(torch.device("cpu")), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if free < _NEEDED_MEMORY:
        problems.append(
            f"{format_bytes(free)} of memory are free, and the default model needs about {format_bytes(_NEEDED_MEMORY)}"
        )
    return [
        ("processor", f"{_processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} PyTorch threads"),
        ("features", " ".join(name for name in _FEATURES_THAT_COUNT if name in features) or "not known"),
        ("memory", f"{format_bytes(free)} free of {format_bytes(total)}"),
        *_gpus(),
    ]


def _gpus() -> Rows:
    import torch

    if not torch.cuda.is_available():
        built_for = f"PyTorch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "PyTorch has no CUDA"
        return [("gpu", f"none ({built_for})")]
    from mini_vllm.worker.memory import free_memory

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [
        (str(device), f"{torch.cuda.get_device_name(device)}, {format_bytes(free_memory(device))} free")
        for device in devices
    ]


def _processor_name() -> str:
    """The model's name as Linux gives it; elsewhere what Python knows, which is often the architecture only."""
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _store(problems: list[str]) -> Rows:
    folder = home()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        problems.append(f"{existing} cannot be written; set MINI_VLLM_HOME to a folder of yours")
    source = KNOWN_MODELS[DEFAULT_MODEL]
    needed = source.wheel_bytes + source.file_bytes
    if free < needed and all(stored.files.name != DEFAULT_MODEL for stored in list_models()):
        problems.append(
            f"{format_bytes(free)} are free for {folder}, and pulling the default model takes {format_bytes(needed)}"
        )
    return [("folder", str(folder)), ("free on that disk", format_bytes(free))]


def _plan(problems: list[str]) -> Rows:
    """What `LLMEngine()` without options would use."""
    import torch

    from mini_vllm.model.attention_backends import make_backend
    from mini_vllm.model.device import resolve_device
    from mini_vllm.model.dtype import resolve_dtype

    config = EngineConfig()
    device = resolve_device("auto")
    choice = resolve_dtype(config.dtype, device)
    kernels, is_used = _kernels(choice.dtype, device)
    backend = make_backend(config.attention_backend, config.cache, config.block_size, choice.dtype, device)
    square = torch.ones(64, 64, dtype=choice.dtype, device=device)
    if not torch.equal(square @ square, square * 64):
        problems.append(f"a product of two matrices of ones in {choice.dtype} on {device} came out wrong")
    attention = "PagedCpuBackend" if is_used else type(backend).__name__
    return [
        ("device", f"{device} ({'the first GPU' if device.type == 'cuda' else 'there is no GPU'})"),
        ("dtype", f"{str(choice.dtype).removeprefix('torch.')} ({choice.reason})"),
        *kernels,
        ("attention", f"{attention} (cache={config.cache}, blocks of {config.block_size} tokens)"),
        ("keys and values", f"{config.kv_cache_memory_fraction:.0%} of the memory that is free after loading"),
    ]


def _kernels(dtype: torch.dtype, device: torch.device) -> tuple[Rows, bool]:
    """What is to be said of the C++ kernels, and whether they would be used. Nothing is built here."""
    import torch

    from mini_vllm.errors import KernelBuildError
    from mini_vllm.kernels.cpu.build import find_compiler, kernels_are_built, known_failure, load_kernels
    from mini_vllm.model.exactness import is_exact
    from mini_vllm.model.onednn_linear import prefers_onednn

    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return [("kernels", f"none for {dtype} on {device}")], False
    try:
        if not kernels_are_built(home()):
            if (reason := known_failure(home())) is not None:
                return [("kernels", f"plain PyTorch: {reason}")], False
            compiler = find_compiler()[0]
            return [("kernels", f"C++, built at the first start with {compiler}: about half a minute, once")], True
        load_kernels(home())
    except KernelBuildError as error:
        return [("kernels", f"plain PyTorch: {error}")], False
    linear = "oneDNN" if dtype == torch.bfloat16 and prefers_onednn() else "C++"
    exact = [
        f"{str(one).removeprefix('torch.')} {'yes' if is_exact(one) else 'NO'}"
        for one in (torch.float32, torch.bfloat16)
    ]
    return [
        ("kernels", f"C++ for attention, norms and sampling, {linear} for linear layers"),
        ("exact to the bit", f"{', '.join(exact)} (the same answer alone and in any batch)"),
    ], True

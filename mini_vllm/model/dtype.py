"""Which dtype the model runs in, and why.

Where it stands: asked once by the loader; the reason goes to the log and to `mini-vllm doctor`.

                       auto                                                    asked for by name
    CPU                bfloat16 if the processor multiplies it, else float32   as asked
    GPU                bfloat16 if the GPU multiplies it; else float16 for     as asked
                       a float16 checkpoint, float32 for any other

What always holds: a dtype that was asked for by name is the one that runs. bfloat16 has float32's range and float16 has
not, so `auto` never squeezes a model into float16 that was not saved in it: that is how logits become NaN.

In vLLM: `_get_and_verify_dtype` in `vllm/config/model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mini_vllm.errors import InvalidConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Instructions that multiply bfloat16: x86 by the names of Linux and of PyTorch (which agree), ARM by that of Linux.
_BFLOAT16_FEATURES = ("amx_bf16", "avx512_bf16", "bf16")
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype that runs, and the reason as a clause for the log: "the processor has avx512_bf16"."""

    dtype: torch.dtype
    reason: str


def resolve_dtype(name: str, device: str | torch.device, checkpoint_dtype: str | None = None) -> DtypeChoice:
    """Choose the dtype of weights and activations.

    Args:
        name: "auto", "float32", "bfloat16" or "float16".
        device: where the model will run.
        checkpoint_dtype: what the checkpoint says it was saved in, such as "bfloat16".

    Raises:
        InvalidConfigError: another name.
    """
    device = torch.device(device)
    if name in _DTYPES:
        return DtypeChoice(_DTYPES[name], _named_reason(_DTYPES[name], device, checkpoint_dtype))
    if name != "auto":
        raise InvalidConfigError(f"dtype must be auto, {', '.join(_DTYPES)}, got {name!r}", field="dtype")
    return _auto_on_cpu() if device.type == "cpu" else _auto_on_gpu(device, checkpoint_dtype)


def processor_features() -> frozenset[str]:
    """Names of the processor's instruction sets: Linux's own list, else what PyTorch knows; empty if nobody says."""
    if _CPU_INFO.exists():  # Linux
        return _features_of_cpu_info(_CPU_INFO.read_text(encoding="utf-8", errors="replace"))
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # not in every PyTorch that we run on
    if capabilities is None:
        return frozenset()
    return frozenset(name for name, is_there in capabilities().items() if is_there is True)


def bfloat16_feature() -> str | None:
    """The instruction set with which this processor multiplies bfloat16, or None."""
    features = processor_features()
    return next((name for name in _BFLOAT16_FEATURES if name in features), None)


def _features_of_cpu_info(text: str) -> frozenset[str]:
    """The words after "flags" (x86) or "Features" (ARM); all cores have the same."""
    for line in text.splitlines():
        key, _, words = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(words.split())
    return frozenset()


def _auto_on_cpu() -> DtypeChoice:
    feature = bfloat16_feature()
    if feature is None:
        return DtypeChoice(torch.float32, "the processor does not say that it multiplies bfloat16")
    return DtypeChoice(torch.bfloat16, f"the processor multiplies bfloat16 ({feature})")


def _auto_on_gpu(device: torch.device, checkpoint_dtype: str | None) -> DtypeChoice:
    # By the generation of the device that runs: torch.cuda.is_bf16_supported counts emulation too, and asks about
    # the current device. Every AMD GPU that PyTorch supports multiplies bfloat16.
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0):
        return DtypeChoice(torch.bfloat16, "the GPU multiplies bfloat16")
    if checkpoint_dtype == "float16":
        return DtypeChoice(torch.float16, "the GPU does not multiply bfloat16, and the checkpoint is float16")
    return DtypeChoice(
        torch.float32, "the GPU does not multiply bfloat16, and a checkpoint that is not float16 may overflow it"
    )


def _named_reason(dtype: torch.dtype, device: torch.device, checkpoint_dtype: str | None) -> str:
    """Why a dtype that was asked for may disappoint, or just that it was asked for."""
    if dtype is torch.float16 and checkpoint_dtype == "bfloat16":
        return "as asked; the checkpoint is bfloat16, whose range is wider: activations may overflow"
    if dtype is torch.float16 and device.type == "cpu":
        return "as asked; on a CPU it works, but is slower than the others"
    if dtype is torch.bfloat16 and device.type == "cpu" and bfloat16_feature() is None:
        return "as asked; the processor does not multiply it in hardware, so it is slow"
    return "as asked"

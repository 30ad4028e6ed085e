"""Where the model runs: from the option `device` to a PyTorch device.

Where it stands: asked once at start, before the weights are loaded; `mini-vllm doctor` asks the same.

In vLLM: `vllm/platforms/`.
"""

from __future__ import annotations

import torch

from mini_vllm.errors import InvalidConfigError


def resolve_device(name: str) -> torch.device:
    """The device of that name; `auto` is the first GPU, or the CPU where there is none.

    Raises:
        InvalidConfigError: another word, or a GPU that is not here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}", field="device") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}", field="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidConfigError(
            f"device {name!r} is not here: PyTorch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices",
            field="device",
        )
    return device

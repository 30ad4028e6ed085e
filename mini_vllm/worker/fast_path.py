"""Whether the C++ kernels are used, and putting them in place.

Where it stands: called once at start-up, between loading the model and making the executor.

    kernels="auto"   where they fit: on a processor, in float32 or bfloat16, with a compiler or a library built before;
                     else one line in the log says why not; a compiler that failed is not tried at each start
    kernels="cpu"    demanded: what stands against it is an error
    kernels="none"   plain PyTorch alone, as one reads it

In vLLM: `vllm/platforms/cpu.py`.
"""

from __future__ import annotations

import logging

import torch

from mini_vllm.config import EngineConfig
from mini_vllm.errors import InvalidConfigError, KernelBuildError
from mini_vllm.kernels.cpu.build import load_kernels
from mini_vllm.model.cpu_layers import use_cpu_kernels
from mini_vllm.model.language_model import LanguageModel
from mini_vllm.store.model_store import home

logger = logging.getLogger(__name__)


def prepare_kernels(config: EngineConfig, model: LanguageModel, dtype: torch.dtype, device: torch.device) -> bool:
    """Load the kernels and swap the model's layers for their fast twins, where the options and the machine allow it.

    Args:
        config: `kernels` and `threads` count.
        model: loaded; changed in place.
        dtype, device: what it computes in, and where.

    Returns:
        Whether the kernels are in use.

    Raises:
        InvalidConfigError: they were demanded for a dtype or a device that they do not serve.
        KernelBuildError: they were demanded and cannot be had.
    """
    if config.kernels == "none":
        return False
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        if config.kernels == "cpu":
            raise InvalidConfigError(
                f"kernels='cpu' computes in float32 or bfloat16 on the CPU, not in {dtype} on {device}; use 'auto'",
                field="kernels",
            )
        return False
    try:
        load_kernels(home(), is_demanded=config.kernels == "cpu")
    except KernelBuildError as error:
        if config.kernels == "cpu":
            raise
        logger.warning("running without the fast kernels: %s", error)
        return False
    if isinstance(model, torch.nn.Module):
        use_cpu_kernels(model)
    return True

"""mini vLLM: an LLM inference engine to be read, changed and used.

The public names are imported on first use, so that `import mini_vllm` is quick and loads no torch.

The way of a request, always in this direction:

    api -> engine -> scheduler -> worker -> model (+ cache tensors) -> sampler -> engine -> api

In vLLM: `vllm/__init__.py`, lazy as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_vllm.config import EngineConfig
    from mini_vllm.engine.llm import LLM
    from mini_vllm.engine.llm_engine import LLMEngine
    from mini_vllm.outputs import RequestOutput
    from mini_vllm.sampling_params import SamplingParams
    from mini_vllm.structured_outputs import StructuredOutputsParams

__all__ = ["LLM", "EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

_MODULE_OF = {
    "LLM": "mini_vllm.engine.llm",
    "EngineConfig": "mini_vllm.config",
    "LLMEngine": "mini_vllm.engine.llm_engine",
    "RequestOutput": "mini_vllm.outputs",
    "SamplingParams": "mini_vllm.sampling_params",
    "StructuredOutputsParams": "mini_vllm.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mini_vllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

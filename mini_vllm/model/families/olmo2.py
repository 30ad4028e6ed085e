"""OLMo 2: norms after attention and feed-forward network instead of before, and over all heads of queries and keys.

Where it stands: listed in `architectures.py`.

In vLLM: `vllm/model_executor/models/olmo2.py`.
"""

from __future__ import annotations

from dataclasses import replace

from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families.common import Reading, read_common
from mini_vllm.model.hf_config import HFConfig


def read_olmo2(config: HFConfig) -> ModelConfig:
    """OLMo 2 of any size."""
    model = read_common(config, "Olmo2ForCausalLM", Reading(frozenset({"attention_bias"}), eps=1e-5))
    bias = config.boolean("attention_bias", False)
    return replace(model, block="post", norm="rms_float32", qk_norm="width", qkv_bias=bias, output_bias=bias)

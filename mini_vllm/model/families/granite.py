"""Granite 3: a Llama with four multipliers, of embedding, scores, residual branches and logits.

Where it stands: listed in `architectures.py`.

In vLLM: `vllm/model_executor/models/granite.py`.
"""

from __future__ import annotations

from dataclasses import replace

from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families.common import Reading, read_common
from mini_vllm.model.hf_config import HFConfig

_MULTIPLIERS = frozenset({"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"})


def read_granite(config: HFConfig) -> ModelConfig:
    """Each multiplier is 1 where the configuration has none; `logits_scaling` divides."""
    model = read_common(config, "GraniteForCausalLM", Reading(_MULTIPLIERS | {"attention_bias", "mlp_bias"}))
    bias = config.boolean("attention_bias", False)
    return replace(
        model,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )

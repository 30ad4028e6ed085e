"""Cohere's Command R: attention and feed-forward network side by side behind one LayerNorm, rotary pairs interleaved.

Where it stands: listed in `architectures.py`.

In vLLM: `vllm/model_executor/models/commandr.py`.
"""

from __future__ import annotations

from dataclasses import replace

from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families.common import Reading, read_common
from mini_vllm.model.hf_config import HFConfig

_READING = Reading(
    frozenset({"attention_bias", "logit_scale", "use_qk_norm"}), tied=True, eps_key="layer_norm_eps", eps=1e-5
)


def read_cohere(config: HFConfig) -> ModelConfig:
    """Command R and, with norms of each query and key head, Command R+."""
    model = read_common(config, "CohereForCausalLM", _READING)
    bias = config.boolean("attention_bias", False)
    return replace(
        model,
        block="parallel_one_norm",
        norm="layer",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="each_head" if config.boolean("use_qk_norm", False) else None,
        ropes=tuple(replace(rope, interleaved=True) for rope in model.ropes if rope is not None),
        logit_scale=config.number("logit_scale", 0.0625),
    )

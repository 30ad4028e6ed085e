"""Llama and its nearest kin: Mistral, Qwen2 and Qwen3.

Where it stands: listed in `architectures.py`.

In vLLM: `llama.py`, `qwen2.py` and `qwen3.py` in `vllm/model_executor/models/`.
"""

from __future__ import annotations

from dataclasses import replace

from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families.common import Reading, read_common, read_windows
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.weight_map import TensorNames

LLAMA_NAMES = TensorNames()


def read_llama(config: HFConfig) -> ModelConfig:
    """Llama 2 and 3, TinyLlama, SmolLM2."""
    model = read_common(config, "LlamaForCausalLM", Reading(frozenset({"attention_bias", "mlp_bias"})))
    bias = config.boolean("attention_bias", False)
    windows = read_windows(config, model.num_layers, window=None)
    mlp_bias = config.boolean("mlp_bias", False)
    return replace(model, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias, sliding_windows=windows)


def read_mistral(config: HFConfig) -> ModelConfig:
    """Llama with a sliding window, of 4096 unless the configuration says otherwise (here a null means none)."""
    model = read_common(config, "MistralForCausalLM", Reading(frozenset({"sliding_window"})))
    no_window = "sliding_window" in config.raw and not config.has("sliding_window")
    window = None if no_window else config.integer("sliding_window", 4096)
    return replace(model, sliding_windows=read_windows(config, model.num_layers, window))


def read_qwen2(config: HFConfig) -> ModelConfig:
    """Qwen2 and Qwen2.5: biases on the query, key and value projections."""
    model = read_common(config, "Qwen2ForCausalLM", Reading(frozenset({"sliding_window", "use_sliding_window"})))
    return replace(model, qkv_bias=True, sliding_windows=qwen_windows(config, model.num_layers))


def read_qwen3(config: HFConfig) -> ModelConfig:
    """Qwen3: norms on query and key heads, and heads of 128 unless the configuration says otherwise."""
    reads = frozenset({"attention_bias", "sliding_window", "use_sliding_window"})
    model = read_common(config, "Qwen3ForCausalLM", Reading(reads, head_dim=128))
    bias = config.boolean("attention_bias", False)
    windows = qwen_windows(config, model.num_layers)
    return replace(model, qk_norm="head", qkv_bias=bias, output_bias=bias, sliding_windows=windows)


def qwen_windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """Only where `use_sliding_window` is set, and there from layer `max_window_layers` on."""
    window = config.integer("sliding_window", 4096) if config.boolean("use_sliding_window", False) else None
    return read_windows(config, num_layers, window, first=config.integer("max_window_layers", 28, minimum=0))

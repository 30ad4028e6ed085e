"""Gemma, Gemma 2 and Gemma 3 (text).

All of them scale the embedding by sqrt(hidden_size), keep norm weights as their distance from 1, gate by GELU, and use
the embedding as head. Gemma 2 caps scores and logits, norms the output of both halves of a layer, and lets every other
layer slide; Gemma 3 norms queries and keys instead of capping, and its sliding layers have a rotary base of their own.

Where it stands: listed in `architectures.py`.

In vLLM: `gemma.py`, `gemma2.py` and `gemma3.py` in `vllm/model_executor/models/`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mini_vllm.model.config import ModelConfig
from mini_vllm.model.families.common import Reading, read_common, read_layer_types
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.weight_map import TensorNames

SANDWICH_NAMES = TensorNames(post_attention_norm="pre_feedforward_layernorm")

_SANDWICH_READS = frozenset({"attention_bias", "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping"})
# What transformers takes for the text model of a Gemma 3 that says nothing else.
_GEMMA3_TEXT: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_OUTER_KEYS = ("bos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")


def read_gemma(config: HFConfig) -> ModelConfig:
    """The first Gemma. Its early configurations say "gelu" and mean the approximation by tanh."""
    model = _read(config, "GemmaForCausalLM", frozenset({"attention_bias"}))
    return replace(model, activation="gelu_tanh" if model.activation == "gelu" else model.activation)


def read_gemma2(config: HFConfig) -> ModelConfig:
    """Gemma 2: layer 0 slides, layer 1 sees all, and so on."""
    model = _read(config, "Gemma2ForCausalLM", _SANDWICH_READS | {"attn_logit_softcapping"})
    types = _layer_types(config, model.num_layers, pattern=2)
    return replace(
        _sandwich(config, model, types),
        attention_softcap=config.optional_number("attn_logit_softcapping", 50.0),
        logit_softcap=config.optional_number("final_logit_softcapping", 30.0),
    )


def read_gemma3(config: HFConfig) -> ModelConfig:
    """Gemma 3: five layers slide, one sees all. `max_position_embeddings` counts after the stretch by rope scaling."""
    by_type = config.mapping("rope_parameters")
    full, sliding = by_type.raw.get("full_attention"), by_type.raw.get("sliding_attention")
    if full is not None or sliding is not None:
        of_full, of_sliding = config.with_values(rope_parameters=full), config.with_values(rope_parameters=sliding)
    else:
        theta = config.number("rope_local_base_freq", 10_000.0)
        of_full = config
        of_sliding = config.with_values(rope_parameters={"rope_theta": theta}, rope_scaling=None)
    reads = _SANDWICH_READS | {"rope_local_base_freq"}
    model = _read(of_full, "Gemma3ForCausalLM", reads, rope_theta=1_000_000.0)
    local = _read(of_sliding, "Gemma3ForCausalLM", reads)
    types = _layer_types(config, model.num_layers, config.integer("sliding_window_pattern", 6))
    return replace(
        _sandwich(config, model, types),
        max_position_embeddings=config.integer("max_position_embeddings"),
        notes=(),
        qk_norm="head",
        ropes=tuple(local.rope if each == "sliding_attention" else model.rope for each in types),
        logit_softcap=config.optional_number("final_logit_softcapping", None),
    )


def read_gemma3_with_vision(config: HFConfig) -> ModelConfig:
    """The text model of a Gemma 3 that can also see; its configuration leaves out what is usual."""
    text = config.mapping("text_config").raw
    outer = {key: config.raw[key] for key in _OUTER_KEYS if config.has(key)}
    model = read_gemma3(HFConfig({**_GEMMA3_TEXT, **outer, **text}, f"text_config in {config.where}"))
    return replace(
        model,
        eos_token_ids=model.eos_token_ids | config.token_ids("eos_token_id"),
        notes=("the part of the model that sees is left out: text only",),
    )


def _read(config: HFConfig, name: str, reads: frozenset[str], rope_theta: float = 10_000.0) -> ModelConfig:
    """What the three share."""
    # The first one's configurations have only the one key, or both.
    older = name == "GemmaForCausalLM" and not config.has("hidden_activation")
    reading = Reading(
        reads,
        head_dim=256,
        tied=True,
        activation_key="hidden_act" if older else "hidden_activation",
        activation="gelu_pytorch_tanh",
        rope_theta=rope_theta,
    )
    model = read_common(config, name, reading)
    bias = config.boolean("attention_bias", False)
    return replace(
        model,
        qkv_bias=bias,
        output_bias=bias,
        norm="rms_plus_one",
        embedding_scale=math.sqrt(model.hidden_size),
    )


def _layer_types(config: HFConfig, num_layers: int, pattern: int) -> list[str]:
    """`layer_types`, or of every `pattern` layers the last one sees all."""
    if config.has("layer_types"):
        return read_layer_types(config, num_layers)
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)]


def _sandwich(config: HFConfig, model: ModelConfig, types: list[str]) -> ModelConfig:
    """What Gemma 2 and 3 share."""
    window = config.integer("sliding_window", 4096)
    return replace(
        model,
        block="sandwich",
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        sliding_windows=tuple(window if each == "sliding_attention" else None for each in types),
    )

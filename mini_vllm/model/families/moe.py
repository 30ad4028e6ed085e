"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

Where it stands: listed in `architectures.py`; the layers themselves are in `feed_forward.py`.

In vLLM: `mixtral.py`, `qwen2_moe.py`, `qwen3_moe.py` and `olmoe.py` in `vllm/model_executor/models/`.
"""

from __future__ import annotations

from dataclasses import replace

from mini_vllm.errors import ModelLoadError
from mini_vllm.model.config import ExpertsConfig, ModelConfig
from mini_vllm.model.families.common import Reading, read_common, read_windows
from mini_vllm.model.families.llama import qwen_windows
from mini_vllm.model.hf_config import HFConfig
from mini_vllm.model.weight_map import TensorNames

MIXTRAL_NAMES = TensorNames(mlp="block_sparse_moe.", expert_gate_up=("w1", "w3"), expert_down="w2")

_EXPERTS = frozenset({"num_experts", "num_local_experts"})
_WINDOWS = frozenset({"sliding_window", "use_sliding_window"})


def read_mixtral(config: HFConfig) -> ModelConfig:
    """Mistral with eight experts in each layer, two for each token."""
    reads = _EXPERTS | {"sliding_window"}
    model = read_common(config, "MixtralForCausalLM", Reading(reads, eps=1e-5, rope_theta=1_000_000.0))
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return replace(
        model,
        experts=_read_experts(config, model.num_layers, model.intermediate_size, per_token=2, normalize=True),
        sliding_windows=read_windows(config, model.num_layers, window),
    )


def read_qwen2_moe(config: HFConfig) -> ModelConfig:
    """Qwen1.5-MoE and Qwen2-MoE: many small experts, and a large one that every token uses."""
    model = read_common(config, "Qwen2MoeForCausalLM", Reading(_EXPERTS | _WINDOWS))
    inner = config.integer("moe_intermediate_size", 1408)
    experts = _read_experts(config, model.num_layers, inner, per_token=4, normalize=None)
    shared = config.integer("shared_expert_intermediate_size", 5632)
    return replace(
        model,
        experts=replace(experts, shared_intermediate_size=shared),
        qkv_bias=config.boolean("qkv_bias", True),
        sliding_windows=_qwen2_moe_windows(config, model.num_layers),
    )


def read_qwen3_moe(config: HFConfig) -> ModelConfig:
    """Qwen3-MoE: many small experts and none that is shared; norms on query and key heads."""
    reads = _EXPERTS | _WINDOWS | {"attention_bias"}
    model = read_common(config, "Qwen3MoeForCausalLM", Reading(reads))
    inner = config.integer("moe_intermediate_size", 768)
    bias = config.boolean("attention_bias", False)
    window = config.integer("sliding_window", 4096) if config.boolean("use_sliding_window", False) else None
    return replace(
        model,
        experts=_read_experts(config, model.num_layers, inner, per_token=8, normalize=None),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=read_windows(config, model.num_layers, window),
    )


def read_olmoe(config: HFConfig) -> ModelConfig:
    """OLMoE: many small experts; norms over all query heads and over all key heads together."""
    model = read_common(config, "OlmoeForCausalLM", Reading(_EXPERTS | {"attention_bias"}, eps=1e-5))
    bias = config.boolean("attention_bias", False)
    return replace(
        model,
        experts=_read_experts(config, model.num_layers, model.intermediate_size, per_token=8, normalize=None),
        qk_norm="width",
        qkv_bias=bias,
        output_bias=bias,
    )


def _read_experts(
    config: HFConfig, num_layers: int, inner: int, *, per_token: int, normalize: bool | None
) -> ExpertsConfig:
    """The experts; which layers have them is said by `decoder_sparse_step` and `mlp_only_layers`.

    Args:
        config: the parsed `config.json`.
        num_layers: decoder layers.
        inner: width of an expert.
        per_token: the family's default.
        normalize: None reads `norm_topk_prob`.
    """
    num_experts = config.integer("num_experts" if config.has("num_experts") else "num_local_experts")
    chosen = config.integer("num_experts_per_tok", per_token)
    if chosen > num_experts:
        raise ModelLoadError(f"num_experts_per_tok={chosen} in config.json is more than the {num_experts} experts.")
    step, dense = config.integer("decoder_sparse_step", 1), config.token_ids("mlp_only_layers")
    layers = frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if normalize is None:
        normalize = config.boolean("norm_topk_prob", False)
    return ExpertsConfig(num_experts, chosen, inner, normalize, 0, layers)


def _qwen2_moe_windows(config: HFConfig, num_layers: int) -> tuple[int | None, ...]:
    """Every other layer below `max_window_layers`, where `use_sliding_window` is set and no `layer_types` are given."""
    if config.has("layer_types"):
        return qwen_windows(config, num_layers)
    window = config.integer("sliding_window", 4096) if config.boolean("use_sliding_window", False) else None
    last = config.integer("max_window_layers", 28, minimum=0)
    return tuple(window if layer % 2 == 0 and layer < last else None for layer in range(num_layers))

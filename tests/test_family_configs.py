"""What the published configurations of each family mean, and what a family refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tiny_models import tiny_model_config

from mini_vllm.errors import ModelLoadError
from mini_vllm.model.architectures import weight_map
from mini_vllm.model.config import ExpertsConfig, ModelConfig, RopeConfig, model_config_from_hf

# The values of published `config.json` files that decide something, and a few that must be known to decide nothing.
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 128012,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "Phi-3-mini-4k-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "gemma-2b": {
        "architectures": ["GemmaForCausalLM"],
        "attention_bias": False,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_activation": None,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 256000,
    },
    "gemma-2-2b-it": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    },
    "Mixtral-8x7B-Instruct-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    "Qwen1.5-MoE-A2.7B": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "OLMoE-1B-7B-0924": {
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "clip_qkv": None,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 50304,
    },
    "OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "vocab_size": 100352,
    },
    "granite-3.1-2b-instruct": {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "c4ai-command-r-v01": {
        "architectures": ["CohereForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 40,
        "num_key_value_heads": 64,
        "rope_theta": 8000000.0,
        "use_qk_norm": False,
        "vocab_size": 256000,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
    "pythia-70m": {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "starcoder2-3b": {
        "activation_function": "gelu",
        "architectures": ["Starcoder2ForCausalLM"],
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "layer_norm_epsilon": 1e-05,
        "max_position_embeddings": 16384,
        "mlp_type": "default",
        "norm_epsilon": 1e-05,
        "norm_type": "layer_norm",
        "num_attention_heads": 24,
        "num_hidden_layers": 30,
        "num_key_value_heads": 2,
        "rope_theta": 999999.4420358813,
        "sliding_window": 4096,
        "use_bias": True,
        "vocab_size": 49152,
    },
}

# Weights as stored, without a head that is tied, in millions: what the makers or the hub say.
MILLIONS = {
    "SmolLM3-3B": 3075,
    "Phi-3-mini-4k-instruct": 3821,
    "gemma-2b": 2506,
    "gemma-2-2b-it": 2614,
    "gemma-3-4b-it": 3880,  # 4.3 billion with the part that sees
    "Mixtral-8x7B-Instruct-v0.1": 46703,
    "Qwen1.5-MoE-A2.7B": 14316,
    "Qwen3-30B-A3B": 30532,
    "OLMoE-1B-7B-0924": 6919,
    "OLMo-2-1124-7B": 7299,
    "granite-3.1-2b-instruct": 2534,
    "c4ai-command-r-v01": 34981,
    "gpt2": 124,
    "pythia-70m": 70,
    "starcoder2-3b": 3030,
}


def published(name: str) -> ModelConfig:
    return model_config_from_hf(PUBLISHED[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_asks_for_as_many_weights_as_the_model_is_known_to_have(name: str) -> None:
    specs = weight_map(published(name))
    assert round(sum(math.prod(shape) for spec in specs for shape in spec.shapes) / 1e6) == MILLIONS[name]


def test_smollm3_turns_three_layers_of_four() -> None:
    config = published("SmolLM3-3B")
    assert config.ropes == (RopeConfig(theta=5e6), RopeConfig(theta=5e6), RopeConfig(theta=5e6), None) * 9
    assert config.tie_word_embeddings


def test_mixtures_of_experts_as_published() -> None:
    assert published("Mixtral-8x7B-Instruct-v0.1").experts == ExpertsConfig(8, 2, 14336, True, 0, frozenset(range(32)))
    assert published("Qwen1.5-MoE-A2.7B").experts == ExpertsConfig(60, 4, 1408, False, 5632, frozenset(range(24)))
    assert published("Qwen3-30B-A3B").experts == ExpertsConfig(128, 8, 768, True, 0, frozenset(range(48)))
    assert published("OLMoE-1B-7B-0924").experts == ExpertsConfig(64, 8, 1024, False, 0, frozenset(range(16)))


def test_granite_and_cohere_scale_their_logits() -> None:
    granite = published("granite-3.1-2b-instruct")
    scales = (granite.embedding_scale, granite.attention_scale, granite.residual_scale, granite.logit_scale)
    assert scales == (12.0, 0.015625, 0.22, 0.125)
    assert published("c4ai-command-r-v01").logit_scale == 0.0625


def test_gpt2_has_its_sizes_under_other_names_and_pythia_its_rotary_embedding() -> None:
    gpt2 = published("gpt2")
    assert (gpt2.hidden_size, gpt2.intermediate_size, gpt2.num_layers, gpt2.num_heads) == (768, 3072, 12, 12)
    assert (gpt2.max_position_embeddings, gpt2.rope, gpt2.learned_positions) == (1024, None, True)
    assert published("pythia-70m").rope == RopeConfig(partial=0.25)


def test_gemma3_with_vision_takes_from_its_text_part_what_is_there_and_the_rest_from_what_is_usual() -> None:
    config = published("gemma-3-4b-it")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope == RopeConfig(theta=1e4)
    assert config.ropes[5] == RopeConfig("linear", 1e6, 8.0, 131072)
    assert (config.max_position_embeddings, config.eos_token_ids) == (131072, {1, 106})
    assert config.checkpoint_dtype == "bfloat16"


# The text part of Gemma 3 1B and 4B as published (transformers 4), with fewer layers.
GEMMA3 = {
    "num_hidden_layers": 7,
    "rope_theta": 1_000_000,
    "rope_local_base_freq": 10_000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "cache_implementation": "hybrid",
}


def test_gemma3_in_its_older_spelling_has_two_rope_bases_and_every_sixth_layer_global() -> None:
    config = tiny_model_config("Gemma3ForCausalLM", **GEMMA3)
    local, everywhere = RopeConfig(theta=1e4), RopeConfig(theta=1e6)
    assert config.ropes == (local,) * 5 + (everywhere, local)
    assert config.sliding_windows == (512,) * 5 + (None, 512)
    assert config.attention_scale == 1 / 16
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    assert config.tie_word_embeddings


def test_gemma3_rope_scaling_stretches_the_global_layers_and_the_context_counts_it_already() -> None:
    config = tiny_model_config("Gemma3ForCausalLM", **GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert config.ropes[4:6] == (RopeConfig(theta=1e4), RopeConfig("linear", 1e6, 8.0, 32768))
    assert config.max_position_embeddings == 32768


def test_gemma2_caps_scores_and_logits_unless_its_configuration_says_null() -> None:
    config = tiny_model_config("Gemma2ForCausalLM")
    assert (config.attention_softcap, config.logit_softcap, config.sliding_windows) == (50.0, 30.0, (4096, None, 4096))
    config = tiny_model_config("Gemma2ForCausalLM", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (config.attention_softcap, config.logit_softcap) == (None, None)


@pytest.mark.parametrize("spelling", [{"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}])
def test_the_first_gemma_means_the_approximation_by_tanh(spelling: dict[str, str]) -> None:
    assert tiny_model_config("GemmaForCausalLM", **spelling).activation == "gelu_tanh"


# As published with Phi-4-mini-instruct, with heads of 8.
PHI4_MINI = {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": [1.0, 32.0, 47.0], "short_factor": [1.0, 1.0, 1.0], "type": "longrope"},
    "sliding_window": 262144,
    "tie_word_embeddings": True,
}


def test_phi4_mini_turns_three_quarters_of_a_head_with_two_sets_of_factors() -> None:
    config = tiny_model_config("Phi3ForCausalLM", **PHI4_MINI)
    rope = config.rope
    assert rope is not None
    assert (rope.rope_type, rope.rotary_dim(config.head_dim), rope.original_max_position) == ("longrope", 6, 4096)
    assert (rope.short_factors, rope.long_factors) == ((1.0, 1.0, 1.0), (1.0, 32.0, 47.0))
    assert rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)  # 131072 = 4096 * 2 ** 5, 4096 = 2 ** 12
    assert config.max_position_embeddings == 131072


@pytest.mark.parametrize("older", ["su", "yarn"])
def test_phi3_called_longrope_by_other_names_at_first(older: str) -> None:
    scaling = {**PHI4_MINI["rope_scaling"], "type": older}
    renamed = tiny_model_config("Phi3ForCausalLM", **{**PHI4_MINI, "rope_scaling": scaling})
    assert renamed == tiny_model_config("Phi3ForCausalLM", **PHI4_MINI)
    with pytest.raises(ModelLoadError):
        tiny_model_config("LlamaForCausalLM", rope_scaling=scaling)


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("Phi3ForCausalLM", {**PHI4_MINI, "partial_rotary_factor": 1.0}, "short_factor .* each of the 4 pairs"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.125}, "turned in 1 dimensions"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "at most 1"),
        ("Phi3ForCausalLM", {"lm_head_bias": True}, "lm_head_bias=True"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "each of the 3 layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2, 0]}, "a 0 or a 1"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma2ForCausalLM", {"hidden_activation": "quick_gelu"}, "hidden_activation='quick_gelu'"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar .* positive"),
    ],
)
def test_families_refuse_what_they_do_not_implement(architecture: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        tiny_model_config(architecture, **values)

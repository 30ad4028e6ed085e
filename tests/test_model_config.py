"""Reading `config.json`: what each family's values mean, and that nothing which changes the numbers is guessed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tiny_models import tiny_config, tiny_model_config

from mini_vllm.errors import ModelLoadError, UnsupportedModelError
from mini_vllm.model.config import RopeConfig, model_config_from_hf

# As published with SmolLM2-135M-Instruct.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_the_default_model_is_read_in_full() -> None:
    config = model_config_from_hf(SMOLLM2)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert config.max_position_embeddings == 8192
    assert config.norm_eps == 1e-5
    assert config.rope == RopeConfig("default", theta=100000.0)
    assert config.tie_word_embeddings
    assert not any([config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm])
    assert config.sliding_windows == (None,) * 30
    assert (config.bos_token_id, config.eos_token_ids) == (1, frozenset({2}))
    assert config.checkpoint_dtype == "bfloat16"
    assert config.notes == ()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eos_token_id": [128001, 128008, 128009]}, frozenset({128001, 128008, 128009})),
        ({"eos_token_id": None}, frozenset()),
        ({"eos_token_id": 0}, frozenset({0})),
    ],
)
def test_every_end_of_sequence_id_is_kept(values: dict[str, Any], expected: frozenset[int]) -> None:
    assert tiny_model_config(**values).eos_token_ids == expected


def test_the_dtype_has_one_meaning_in_both_spellings() -> None:
    assert tiny_model_config(dtype="float16").checkpoint_dtype == "float16"
    assert tiny_model_config(torch_dtype="torch.bfloat16").checkpoint_dtype == "bfloat16"
    assert tiny_model_config().checkpoint_dtype is None


# -- Families ----------------------------------------------------------------------------------------------------------


def test_mistral_slides_by_4096_unless_told_otherwise() -> None:
    assert tiny_model_config("MistralForCausalLM").sliding_windows == (4096,) * 3
    assert tiny_model_config("MistralForCausalLM", sliding_window=16).sliding_windows == (16,) * 3
    assert tiny_model_config("MistralForCausalLM", sliding_window=None).sliding_windows == (None,) * 3


def test_qwen_slides_only_when_use_sliding_window_is_set() -> None:
    values = {"sliding_window": 16, "max_window_layers": 1}
    assert tiny_model_config("Qwen2ForCausalLM", **values).sliding_windows == (None,) * 3
    config = tiny_model_config("Qwen2ForCausalLM", use_sliding_window=True, **values)
    assert config.sliding_windows == (None, 16, 16)


def test_layer_types_go_before_max_window_layers() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    config = tiny_model_config("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=16, layer_types=types)
    assert config.sliding_windows == (16, None, None)


def test_qwen2_has_biases_on_its_input_projections_only() -> None:
    config = tiny_model_config("Qwen2ForCausalLM")
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_qwen3_has_head_norms_and_heads_of_128_by_default() -> None:
    config = tiny_model_config("Qwen3ForCausalLM", head_dim=None)
    assert config.qk_norm
    assert config.head_dim == 128


def test_a_head_dim_that_is_given_needs_no_hidden_size_that_the_heads_divide() -> None:
    sizes: dict[str, Any] = {"hidden_size": 34, "num_attention_heads": 4}
    assert tiny_model_config(**sizes, head_dim=8).head_dim == 8
    with pytest.raises(ModelLoadError, match=r"hidden_size=34 .* there is no head_dim"):
        tiny_model_config(**sizes, head_dim=None)


def test_llama_has_one_kv_head_a_query_head_by_default() -> None:
    assert tiny_model_config(num_key_value_heads=None).num_kv_heads == 4


# -- Rotary embedding --------------------------------------------------------------------------------------------------

LLAMA3_VALUES = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_VALUES}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_VALUES}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3_VALUES}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_VALUES}},
        {"rope_parameters": {"type": "llama3", "rope_theta": 5e5, **LLAMA3_VALUES}, "rope_scaling": None},
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_VALUES},
            "rope_scaling": {"rope_type": "llama3", **LLAMA3_VALUES},
            "rope_theta": 5e5,
        },
    ],
)
def test_every_spelling_of_rope_scaling_means_the_same(spelling: dict[str, Any]) -> None:
    assert tiny_model_config(**spelling).rope == RopeConfig("llama3", 5e5, 8.0, 32)


def test_two_spellings_that_disagree_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"rope_parameters and rope_scaling .* disagree"):
        tiny_model_config(rope_parameters={"rope_theta": 5e5}, rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(ModelLoadError, match=r"rope_type='default' and type='linear' .* disagree"):
        tiny_model_config(rope_scaling={"type": "linear", "rope_type": "default", "factor": 2.0})


def test_an_original_length_beside_the_rope_object_goes_first_as_in_transformers() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = tiny_model_config(rope_scaling=rope, original_max_position_embeddings=16)
    assert config.rope.original_max_position == 16


def test_dynamic_scaling_caps_the_context_at_the_original_length_and_says_so() -> None:
    config = tiny_model_config(rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=2048)
    assert config.max_position_embeddings == 2048
    assert len(config.notes) == 1
    assert "dynamic rope scaling" in config.notes[0]
    assert "2048" in config.notes[0]


def test_dynamic_scaling_with_a_stated_original_length_stays_below_it() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 512}
    assert tiny_model_config(rope_scaling=rope, max_position_embeddings=2048).max_position_embeddings == 512


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),  # no original length given: the context is it
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "llama3", **LLAMA3_VALUES}, 2048),
    ],
)
def test_the_context_that_each_rope_type_gives(rope: dict[str, Any], context: int) -> None:
    config = tiny_model_config(rope_scaling=rope, max_position_embeddings=2048)
    assert config.max_position_embeddings == context


# -- Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "llama"}, ["None", "llama", "LlamaForCausalLM"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["LlamaForCausalLM"]),
        ({"hidden_act": "relu2"}, ["hidden_act", "relu2", "silu"]),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, ["proportional", "linear", "yarn"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, ["mrope", "linear"]),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, ["mrope", "linear"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, ["full_attention", "rope_theta"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor", "0.25"]),
        ({"attention_multiplier": 0.015625}, ["attention_multiplier", "0.015625"]),
        ({"residual_multiplier": 0.22}, ["residual_multiplier", "0.22", "1"]),
        ({"logits_scaling": 8}, ["logits_scaling", "8"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        ({"rope_interleaved": True}, ["rope_interleaved", "True"]),
        ({"no_rope_layers": [1, 1, 0]}, ["no_rope_layers"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"num_local_experts": 8}, ["num_local_experts", "8"]),
        ({"sliding_window": 16}, ["sliding_window", "16"]),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(values: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        model_config_from_hf({**tiny_config(), **values})
    for text in named:
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("MistralForCausalLM", {"attention_bias": True}),
        ("MistralForCausalLM", {"mlp_bias": True}),
        ("Qwen2ForCausalLM", {"attention_bias": True}),
        ("Qwen3ForCausalLM", {"mlp_bias": True}),
    ],
)
def test_a_family_refuses_what_only_another_family_has(architecture: str, values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(values))):
        tiny_model_config(architecture, **values)


def test_layer_types_that_are_unknown_or_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        tiny_model_config("Qwen3ForCausalLM", layer_types=["linear_attention"] * 3)
    with pytest.raises(ModelLoadError, match="must list 3 layers"):
        tiny_model_config("Qwen3ForCausalLM", layer_types=["full_attention"])
    with pytest.raises(ModelLoadError, match="no sliding window"):
        tiny_model_config("LlamaForCausalLM", layer_types=["sliding_attention"] * 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* at least 1, not 0"),
        ({"vocab_size": "97"}, "vocab_size .* whole number"),
        ({"vocab_size": True}, "vocab_size .* whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps .* positive number, not nan"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings .* true or false"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .* multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 .* odd"),
        ({"head_dim": None, "hidden_size": 30}, "hidden_size=30 .* multiple of num_attention_heads=4"),
        ({"eos_token_id": [2, "end"]}, "eos_token_id .* token ids"),
        ({"rope_scaling": "linear"}, "rope_scaling .* must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling in config.json has no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor in rope_scaling .* positive number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "has no low_freq_factor"),
        ({"rope_theta": 1.0}, "rope_theta=1.0 .* greater than 1"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3_VALUES, "low_freq_factor": 4.0}}, "less than high_freq_factor"),
    ],
)
def test_missing_and_impossible_values_are_refused_with_their_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        tiny_model_config(**values)


def test_keys_that_change_nothing_are_accepted() -> None:
    neutral = {"residual_multiplier": 1.0, "attn_logit_softcapping": None, "num_experts": 0, "use_qk_norm": False}
    assert tiny_model_config(**neutral) == tiny_model_config()
    assert tiny_model_config(hidden_act="swish") == tiny_model_config()


def test_reading_a_configuration_loads_no_torch() -> None:
    code = f"""
import sys
from mini_vllm.model.architectures import weight_map
from mini_vllm.model.config import model_config_from_hf
weight_map(model_config_from_hf({SMOLLM2!r}))
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"

"""The transformer against the transformers library: logits of tiny random models, saved to disk and read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import (
    CausalAttention,
    build_tiny_model,
    load_tiny_model,
    our_logits,
    some_tokens,
)

TOLERANCE = 1e-4

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
# theta 100 and an original context of 32 put pairs on both sides of llama3's and yarn's limits, and between them.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN_FULL = {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
YARN_FACTOR = {**YARN, "attention_factor": 1.3}

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": LINEAR,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with all options": YARN_FULL,
    "yarn with attention_factor": YARN_FACTOR,
}
ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def assert_parity(directory: Path, architecture: str, *, length: int = 70, **changes: object) -> None:
    tiny = build_tiny_model(directory, architecture, **changes)
    tokens = some_tokens(length)
    torch.testing.assert_close(our_logits(load_tiny_model(tiny), tokens), tiny.logits(tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rope", ROPES)
def test_each_rope_type_gives_the_logits_of_transformers_up_to_3x_the_original_context(
    tmp_path: Path, architecture: str, rope: str
) -> None:
    assert_parity(tmp_path, architecture, rope_parameters=ROPES[rope], max_position_embeddings=32, length=96)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dynamic_rope_gives_the_logits_of_transformers_within_the_original_context(
    tmp_path: Path, architecture: str
) -> None:
    assert_parity(tmp_path, architecture, rope_parameters=DYNAMIC, max_position_embeddings=64, length=64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_kv_heads_and_tied_and_untied_heads(tmp_path: Path, architecture: str, num_kv_heads: int, tied: bool) -> None:
    assert_parity(tmp_path, architecture, num_key_value_heads=num_kv_heads, tie_word_embeddings=tied)


@pytest.mark.parametrize("attention_bias", [True, False])
@pytest.mark.parametrize("mlp_bias", [True, False])
def test_llama_with_and_without_biases(tmp_path: Path, attention_bias: bool, mlp_bias: bool) -> None:
    assert_parity(tmp_path, "LlamaForCausalLM", attention_bias=attention_bias, mlp_bias=mlp_bias)


def test_qwen3_with_attention_bias(tmp_path: Path) -> None:
    assert_parity(tmp_path, "Qwen3ForCausalLM", attention_bias=True)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"])
def test_heads_that_are_wider_together_than_the_hidden_size(tmp_path: Path, architecture: str) -> None:
    assert_parity(tmp_path, architecture, head_dim=24)


def test_head_dim_is_derived_when_the_configuration_has_none(tmp_path: Path) -> None:
    assert_parity(tmp_path, "LlamaForCausalLM", head_dim=None, hidden_size=64)


@pytest.mark.parametrize("window", [1, 7, 69, 200])
def test_mistral_with_a_sliding_window(tmp_path: Path, window: int) -> None:
    assert_parity(tmp_path, "MistralForCausalLM", sliding_window=window)


def test_mistral_without_a_sliding_window(tmp_path: Path) -> None:
    assert_parity(tmp_path, "MistralForCausalLM", sliding_window=None)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_layers_slide_from_max_window_layers_on(tmp_path: Path, architecture: str) -> None:
    assert_parity(tmp_path, architecture, use_sliding_window=True, sliding_window=9, max_window_layers=2)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_layers_slide_by_layer_types(tmp_path: Path, architecture: str) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert_parity(tmp_path, architecture, use_sliding_window=True, sliding_window=9, layer_types=types)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decoding_token_by_token_over_kept_keys_gives_the_logits_of_one_pass(tmp_path: Path, architecture: str) -> None:
    tiny = build_tiny_model(tmp_path, architecture)
    model, tokens = load_tiny_model(tiny), some_tokens(20)
    attention = CausalAttention(model.layer_specs)
    rows = []
    with torch.no_grad():
        for start, end in [(0, 7), *((position, position + 1) for position in range(7, 20))]:
            hidden = model(torch.tensor(tokens[start:end]), torch.arange(start, end), attention)
            rows.append(model.logits(hidden))
    torch.testing.assert_close(torch.cat(rows), tiny.logits(tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_rounds_where_transformers_rounds(tmp_path: Path, architecture: str) -> None:
    # Bit-equal where the two multiply alike. A rounding more or less anywhere (frequencies, norms, SiLU, residuals) is
    # an error as large as that of bfloat16 itself, which is what the bound measures.
    tiny = build_tiny_model(tmp_path, architecture, dtype=torch.bfloat16)
    tokens = some_tokens(40)
    ours, theirs = our_logits(load_tiny_model(tiny, torch.bfloat16), tokens), tiny.logits(tokens)
    exact = our_logits(load_tiny_model(tiny, torch.float32), tokens)
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 0.5 * (theirs - exact).abs().mean()

"""The rotary embedding against the transformers library, at positions that short prompts never reach (fault F95)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model_config
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mini_vllm.model.config import ModelConfig, RopeConfig
from mini_vllm.model.rotary import ApplyRotary, RotaryEmbedding, inverse_frequencies

POSITIONS = torch.tensor([0, 1, 1_000, 8_000, 20_000])

# As in the checkpoints of Llama 3.1, Yarn-Llama-2, Qwen2.5, gpt-oss and DeepSeek V3.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn without rounding": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn with mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn with one mscale": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.0},
    "yarn with attention_factor": {**YARN, "attention_factor": 1.25},
    "yarn with a context so short that the ramp is a step": {**YARN, "original_max_position_embeddings": 4},
    "yarn with the factor left to the two lengths": {**YARN, "factor": None},
}
THETAS = [10_000.0, 500_000.0]


def both(rope: dict[str, Any], theta: float, max_position: int = 32_768) -> tuple[ModelConfig, LlamaConfig]:
    """Our configuration and that of transformers."""
    shape = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "max_position_embeddings": max_position}
    parameters = {**rope, "rope_theta": theta}
    return tiny_model_config(rope_parameters=parameters, **shape), LlamaConfig(
        rope_parameters=dict(parameters), **shape
    )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("theta", THETAS)
def test_frequencies_and_attention_factor_equal_those_of_transformers_to_the_bit(rope: str, theta: float) -> None:
    ours, theirs = both(ROPES[rope], theta)
    compute = ROPE_INIT_FUNCTIONS.get(ROPES[rope]["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    inv_freq, attention_factor = compute(theirs)
    assert torch.equal(inverse_frequencies(ours.rope, ours.head_dim), inv_freq)
    assert ours.rope.attention_factor == attention_factor


@pytest.mark.parametrize("rope", ROPES)
def test_cos_and_sin_equal_those_of_transformers_at_far_positions(rope: str) -> None:
    ours, theirs = both(ROPES[rope], 10_000.0)
    cos, sin = RotaryEmbedding(ours.rope, ours.head_dim)(POSITIONS, torch.float32)
    expected_cos, expected_sin = LlamaRotaryEmbedding(theirs)(torch.empty(0), POSITIONS[None])
    assert cos.shape == (5, 1, 64)
    torch.testing.assert_close(cos[:, 0], expected_cos[0, :, :64], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[:, 0], expected_sin[0, :, :64], atol=1e-6, rtol=0)


def test_angles_keep_float32_when_the_model_is_cast_to_bfloat16() -> None:
    exact, _ = RotaryEmbedding(RopeConfig(), 8)(torch.tensor([257]), torch.float32)
    cos, _ = RotaryEmbedding(RopeConfig(), 8).to(torch.bfloat16)(torch.tensor([257]), torch.bfloat16)
    assert torch.equal(cos, exact.to(torch.bfloat16))


def test_frequencies_are_real_numbers_when_the_model_is_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        rotary = RotaryEmbedding(RopeConfig(theta=100.0), 4)
    assert rotary.inv_freq.tolist() == [1.0, pytest.approx(0.1)]


def test_rotation_pairs_each_dimension_with_the_one_half_a_head_away() -> None:
    # A quarter turn sends (a, b) to (-b, a); pair 1 does not turn.
    cos, sin = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    query = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned, _ = ApplyRotary()(query, query, cos, sin)
    assert turned.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_scores_depend_on_the_distance_of_query_and_key_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 16, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        cos, sin = RotaryEmbedding(RopeConfig(), 16)(torch.tensor([query_position, key_position]), torch.float32)
        turned_query, _ = ApplyRotary()(query, query, cos[:1], sin[:1])
        turned_key, _ = ApplyRotary()(key, key, cos[1:], sin[1:])
        return float((turned_query * turned_key).sum())

    assert score(5, 2) == pytest.approx(score(1005, 1002), abs=1e-3)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)

"""Families that differ in attention, norms or experts, through the whole engine: every mode gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_doubles import BYTE_VOCAB_SIZE, EOS, assert_quiet, make_engine, run_to_end
from test_equality_matrix import PROMPTS, SMALLEST_GAP, greedy_gap
from test_model_families import FAMILIES
from tiny_models import tiny_model_config

from mini_vllm.model.transformer import Transformer
from mini_vllm.naive_generate import generate_without_cache

MAX_TOKENS = 10
# The seed of each family's weights: with these the best token is always clear (the test asserts it).
SEEDS = {
    "Mistral": 0,
    "SmolLM3 with windows and biases": 0,
    "Phi-4-mini": 0,
    "Gemma 2": 0,
    "Gemma 3": 0,
    "Qwen2-MoE": 0,
    "OLMoE": 0,
    "OLMo 2": 1,
    "Cohere with norms and biases": 1,
    "GPT-2": 0,
    "GPT-NeoX": 0,
}
MODES: list[dict[str, Any]] = [
    {"cache": "contiguous", "num_kv_blocks": 5},
    {"block_size": 1, "num_kv_blocks": 1024, "max_num_batched_tokens": 3},
    {"block_size": 4, "num_kv_blocks": 30},  # preempts
    {"block_size": 16, "scheduling": "static", "max_num_batched_tokens": 17},
    {"block_size": 16, "scheduling": "sequential", "enable_prefix_caching": False},
]


def random_model(name: str) -> Transformer:
    family = FAMILIES[name]
    changes = {**family.changes, "vocab_size": BYTE_VOCAB_SIZE, "max_position_embeddings": 256}
    model = Transformer(tiny_model_config(family.architecture, **changes)).eval()
    generator = torch.Generator().manual_seed(SEEDS[name])
    for parameter_name, parameter in model.named_parameters():
        offset = 1.0 if "norm" in parameter_name and parameter_name.endswith("weight") else 0.0
        parameter.copy_(offset + torch.randn(parameter.shape, generator=generator) * 0.2)
    model.settle_context(256)
    return model


@pytest.mark.parametrize("name", SEEDS)
def test_every_mode_gives_the_tokens_of_the_loop_without_a_cache(name: str) -> None:
    model = random_model(name)
    expected = [generate_without_cache(model, prompt, MAX_TOKENS, {EOS}) for prompt in PROMPTS]
    gaps = [greedy_gap(model, prompt, answer) for prompt, answer in zip(PROMPTS, expected, strict=True)]
    assert min(gaps) >= SMALLEST_GAP, gaps
    assert len({tuple(answer) for answer in expected}) >= 5
    for mode in MODES:
        engine = make_engine(model, **mode)
        for _ in range(2):  # the second time over a warm prefix cache, where there is one
            ids = [engine.add_request(prompt, temperature=0, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
            outputs = run_to_end(engine)
            assert [outputs[request_id][-1].outputs[0].token_ids for request_id in ids] == expected, mode
        assert_quiet(engine)

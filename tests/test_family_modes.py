"""Families that differ in attention, norms or experts, through the whole engine: every mode gives the same tokens.

On the fast path it is to the bit, tokens and logprobs, as for Llama (`test_equality_bits.py`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_doubles import BYTE_VOCAB_SIZE, EOS, assert_quiet, make_engine, run_to_end
from test_equality_matrix import PROMPTS, SMALLEST_GAP, greedy_gap
from test_model_families import FAMILIES
from tiny_models import tiny_model_config

from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.kernels.cpu.build import load_kernels
from mini_vllm.model.cpu_layers import use_cpu_kernels
from mini_vllm.model.transformer import Transformer
from mini_vllm.naive_generate import generate_without_cache
from mini_vllm.store.model_store import home

MAX_TOKENS = 10
# The seed of each family's weights: with these the best token is always clear (the test asserts it).
SEEDS = {
    "Mistral": 1,
    "SmolLM3 with windows and biases": 0,
    "Phi-4-mini": 0,
    "Gemma 2": 0,
    "Gemma 3": 0,
    "Qwen2-MoE": 0,
    "Qwen3-MoE": 1,
    "OLMoE": 0,
    "OLMo 2": 1,
    "Cohere with norms and biases": 1,
    "GPT-2": 0,
    "GPT-NeoX": 0,
    "StarCoder2": 3,
}
ACTIVATIONS = {"GPTNeoXForCausalLM": "gelu", "Starcoder2ForCausalLM": "gelu_pytorch_tanh"}
MODES: list[dict[str, Any]] = [
    {"cache": "contiguous", "num_kv_blocks": 5},
    {"block_size": 1, "num_kv_blocks": 1024, "max_num_batched_tokens": 3},
    {"block_size": 4, "num_kv_blocks": 30},  # preempts
    {"block_size": 16, "scheduling": "static", "max_num_batched_tokens": 17},
    {"block_size": 16, "scheduling": "sequential", "enable_prefix_caching": False},
]


def random_model(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    family = FAMILIES[name]
    activation = {"hidden_act": ACTIVATIONS.get(family.architecture, "silu")}
    # A width of whole panels, so that the layers of those families that are put together as Llama's run in one call.
    sizes = {"intermediate_size": 64, "vocab_size": BYTE_VOCAB_SIZE, "max_position_embeddings": 256}
    changes = {**activation, **family.changes, **sizes}
    model = Transformer(tiny_model_config(family.architecture, **changes), dtype=dtype).eval()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SEEDS)
def test_on_the_fast_path_every_mode_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    load_kernels(home())
    model = random_model(name, dtype)
    use_cpu_kernels(model)
    fast = {"dtype": dtype, "kernels": True}
    alone = _answers(make_engine(model, parts=fast, scheduling="sequential"))
    modes = [mode for mode in MODES if mode.get("cache") != "contiguous"]
    assert [mode for mode in modes if _answers(make_engine(model, parts=fast, **mode)) != alone] == []


def _answers(engine: LLMEngine) -> list[tuple[list[int], list[float]]]:
    ids = [
        engine.add_request(prompt, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True, temperature=i % 2, seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = run_to_end(engine)
    choices = [outputs[request_id][-1].outputs[0] for request_id in ids]
    return [(list(choice.token_ids), [entry.logprob for entry in choice.logprobs or []]) for choice in choices]

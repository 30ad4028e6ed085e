"""The backbone: every mode of the engine gives the same tokens.

The full product of modes runs on a tiny random transformer in float32; one factor at a time on SmolLM2 is in
`test_golden.py`. The reference R is the plainest thing there is: the naive loop without a cache.

Rows of a float32 matrix product may differ by about 1e-6 between batch sizes, so a token could flip where two
candidates are closer than that. Equality is asserted where every deciding gap is at least 1e-3, and the test asserts
the gaps.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from engine_doubles import EOS, assert_quiet, make_engine, run_to_end, tiny_transformer

from mini_vllm.model.transformer import Transformer
from mini_vllm.naive_generate import generate_with_cache, generate_without_cache
from mini_vllm.outputs import FinishReason
from mini_vllm.sampling_params import SamplingParams

SMALLEST_GAP = 1e-3
MAX_TOKENS = 14
# Lengths around the block sizes below, two that share a beginning of several blocks, and two that are equal.
PROMPTS = [
    list(b"The quick brown fox jumps over the lazy dog"),
    list(b"The quick brown fox jumps over the fence, and"),
    list(b"The quick brown fox jumps over the lazy dog"),
    list(b"x"),
    list(range(40, 55)),
    list(range(40, 56)),
    list(range(40, 57)),
    list(b"a much longer text that goes on " * 2),
]

CACHES = [
    {"cache": "none"},
    {"cache": "contiguous"},
    *({"cache": "paged", "block_size": size} for size in (1, 4, 16, 64)),
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_transformer(seed=3)


@pytest.fixture(scope="module")
def reference(model: Transformer) -> list[list[int]]:
    answers = [generate_without_cache(model, prompt, MAX_TOKENS, {EOS}) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in answers}) >= 6, "the model must answer different prompts differently"
    gaps = [greedy_gap(model, prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    assert min(gaps) >= SMALLEST_GAP, gaps
    return answers


def greedy_gap(model: Transformer, prompt: list[int], answer: list[int]) -> float:
    """The smallest difference between the best and the second best logit along an answer."""
    from mini_vllm.naive_generate import _GrowingCache

    token_ids = [*prompt, *answer]
    with torch.inference_mode():
        hidden = model(torch.tensor(token_ids), torch.arange(len(token_ids)), _GrowingCache(model.layer_specs))
        best = model.logits(hidden[len(prompt) - 1 : -1]).topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def answers_of(model: Transformer, params: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
    engine = make_engine(model, **options)
    ids = [engine.add_request(p, **{"temperature": 0, "max_tokens": MAX_TOKENS, **(params or {})}) for p in PROMPTS]
    outputs = run_to_end(engine)
    assert_quiet(engine)
    return [outputs[request_id][-1].outputs[0].token_ids for request_id in ids]


def test_the_two_naive_loops_agree(model: Transformer, reference: list[list[int]]) -> None:
    assert [generate_with_cache(model, prompt, MAX_TOKENS, {EOS}) for prompt in PROMPTS] == reference


def _product() -> list[dict[str, Any]]:
    modes: list[dict[str, Any]] = [{"cache": "none"}]
    for scheduling, chunked in itertools.product(("sequential", "static", "continuous"), (True, False)):
        shared: dict[str, Any] = {"scheduling": scheduling, "enable_chunked_prefill": chunked}
        # Chunk budgets around one block of 16, and the whole prompt; without chunking the budget is whole prompts.
        budgets = (1, 2, 3, 15, 16, 17, 2048) if chunked else (256,)
        for budget in budgets:
            modes.append({**shared, "cache": "contiguous", "max_num_batched_tokens": budget, "num_kv_blocks": 5})
            for block_size, prefix_caching in itertools.product((1, 4, 16, 64), (True, False)):
                modes.append(
                    {
                        **shared,
                        "cache": "paged",
                        "block_size": block_size,
                        "num_kv_blocks": 1024 // block_size,
                        "enable_prefix_caching": prefix_caching,
                        "max_num_batched_tokens": budget,
                    }
                )
    return modes


def test_every_mode_gives_the_same_tokens(model: Transformer, reference: list[list[int]]) -> None:
    different = [mode for mode in _product() if answers_of(model, **mode) != reference]
    assert different == []


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("scheduling", ["static", "continuous"])
def test_a_pool_of_one_and_a_half_sequences_preempts_and_gives_the_same_tokens(
    model: Transformer, reference: list[list[int]], block_size: int, prefix_caching: bool, scheduling: str
) -> None:
    longest = max(len(prompt) for prompt in PROMPTS) + MAX_TOKENS
    engine = make_engine(
        model,
        block_size=block_size,
        num_kv_blocks=longest * 3 // 2 // block_size,
        enable_prefix_caching=prefix_caching,
        scheduling=scheduling,
    )
    ids = [engine.add_request(prompt, temperature=0, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
    outputs = run_to_end(engine)
    assert sum(outputs[request_id][-1].metrics.num_preemptions for request_id in ids) > 0
    assert [outputs[request_id][-1].outputs[0].token_ids for request_id in ids] == reference
    for request_id in ids:  # nothing is sent twice, nothing is lost
        streamed = [token for output in outputs[request_id] for token in output.token_ids]
        assert streamed == outputs[request_id][-1].outputs[0].token_ids
    assert_quiet(engine)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_warm_prefix_cache_gives_the_same_tokens(
    model: Transformer, reference: list[list[int]], block_size: int
) -> None:
    engine = make_engine(model, block_size=block_size, num_kv_blocks=2048 // block_size)
    for run in range(2):
        ids = [engine.add_request(prompt, temperature=0, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
        outputs = run_to_end(engine)
        assert [outputs[request_id][-1].outputs[0].token_ids for request_id in ids] == reference
        for request_id, prompt in zip(ids, PROMPTS, strict=True):
            cached = outputs[request_id][-1].num_cached_tokens
            assert cached <= len(prompt) - 1
            if run == 1:
                assert cached == (len(prompt) - 1) // block_size * block_size


MIXED = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"temperature": 1.3, "top_k": 20, "seed": -3},
    {"temperature": 1.0, "min_p": 0.05, "seed": 4, "presence_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.9, "seed": 2**64 - 1, "logit_bias": {65: 5.0}},
    {"temperature": 1.0, "seed": 7, "n": 3},
]
MIXED_MODES = [
    {"scheduling": "sequential"},
    {"scheduling": "static"},
    {"cache": "contiguous", "num_kv_blocks": 6},
    {"cache": "none"},
    {"block_size": 1, "num_kv_blocks": 2048},
    {"block_size": 4, "num_kv_blocks": 512, "max_num_batched_tokens": 5},
    {"block_size": 16, "enable_chunked_prefill": False},
    {"block_size": 4, "num_kv_blocks": 60},
    {"block_size": 16, "num_kv_blocks": 16, "enable_prefix_caching": False},
]


def mixed_answers(model: Transformer, **options: Any) -> list[list[list[int]]]:
    engine = make_engine(model, **options)
    ids = [
        engine.add_request(prompt, SamplingParams(**{"max_tokens": MAX_TOKENS, **fields}))
        for prompt, fields in zip(PROMPTS, MIXED, strict=True)
    ]
    outputs = run_to_end(engine)
    assert_quiet(engine)
    return [[choice.token_ids for choice in outputs[request_id][-1].outputs] for request_id in ids]


def test_mixed_sampling_parameters_and_n_give_the_same_tokens_in_every_mode(model: Transformer) -> None:
    alone = mixed_answers(model, scheduling="sequential", enable_prefix_caching=False)
    assert len({tuple(choice) for choice in alone[7]}) == 3, "the three samples of n = 3 differ"
    different = [mode for mode in MIXED_MODES if mixed_answers(model, **mode) != alone]
    assert different == []


def test_none_equals_contiguous_on_prompts_of_every_length_from_1_to_70(model: Transformer) -> None:
    prompts = [[(7 * i + length) % 256 for i in range(length)] for length in range(1, 71)]
    answers = []
    for cache in ("none", "contiguous"):
        engine = make_engine(model, cache=cache, num_kv_blocks=8)
        ids = [engine.add_request(prompt, temperature=0, max_tokens=4, ignore_eos=True) for prompt in prompts]
        outputs = run_to_end(engine)
        answers.append([outputs[request_id][-1].outputs[0].token_ids for request_id in ids])
        assert all(outputs[i][-1].outputs[0].finish_reason is FinishReason.LENGTH for i in ids)
    assert answers[0] == answers[1]

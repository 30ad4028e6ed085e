"""On the fast path, what a request gets does not depend on what else runs: to the bit, also in bfloat16.

The same requests, one at a time and in every other mode of the engine; tokens and logprobs are compared with `==`. It
is the equality matrix (`test_equality_matrix.py`) without a tolerance.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from engine_doubles import assert_quiet, make_engine, run_to_end, tiny_transformer
from test_equality_matrix import PROMPTS
from torch import Tensor

from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.kernels.cpu.build import load_kernels
from mini_vllm.kernels.cpu.ops import multiplies_bytes
from mini_vllm.model.cpu_layers import FastDecoderLayers, use_cpu_kernels
from mini_vllm.model.transformer import Transformer
from mini_vllm.outputs import RequestOutput
from mini_vllm.store.model_store import home

DTYPES = [torch.float32, torch.bfloat16]
MAX_TOKENS = 14
# Greedy and drawn in turn, so that both ways through the sampler are taken in one batch.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.2, "seed": 8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
]

Answer = tuple[list[int], list[float]]


def test_the_layers_of_this_model_are_fused() -> None:
    """Else the tests below would say nothing of the fused ones, which most models run on."""
    assert all(isinstance(layer, FastDecoderLayers) for layer in fast_model(torch.bfloat16).layers)


@cache
def fast_model(dtype: torch.dtype) -> Transformer:
    load_kernels(home())
    model = tiny_transformer(seed=3).to(dtype)
    use_cpu_kernels(model)
    return model


def fast_engine(dtype: torch.dtype, **options: Any) -> LLMEngine:
    return make_engine(fast_model(dtype), parts={"dtype": dtype, "kernels": True}, **options)


def add_all(engine: LLMEngine) -> list[str]:
    return [
        engine.add_request(prompt, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True, **PARAMS[i % len(PARAMS)])
        for i, prompt in enumerate(PROMPTS)
    ]


def answer_of(output: RequestOutput) -> Answer:
    choice = output.outputs[0]
    return list(choice.token_ids), [entry.logprob for entry in choice.logprobs or []]


def answers(engine: LLMEngine) -> list[Answer]:
    ids = add_all(engine)
    outputs = run_to_end(engine)
    assert_quiet(engine)
    return [answer_of(outputs[request_id][-1]) for request_id in ids]


@cache
def alone(dtype: torch.dtype) -> list[Answer]:
    return answers(fast_engine(dtype, scheduling="sequential"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 2},
        {"max_num_seqs": 64},
        {"scheduling": "static"},
        *({"block_size": size} for size in (1, 2, 8, 32, 64)),
        *({"max_num_batched_tokens": budget} for budget in (1, 3, 16, 40)),
        {"block_size": 4, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_every_mode_gives_the_bits_of_one_request_at_a_time(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert answers(fast_engine(dtype, **options)) == alone(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pool_that_preempts_gives_the_same_bits(dtype: torch.dtype) -> None:
    engine = fast_engine(dtype, block_size=4, num_kv_blocks=24)
    ids = add_all(engine)
    outputs = run_to_end(engine)
    assert sum(outputs[request_id][-1].metrics.num_preemptions for request_id in ids) > 0
    assert [answer_of(outputs[request_id][-1]) for request_id in ids] == alone(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_warm_prefix_cache_gives_the_same_bits(dtype: torch.dtype) -> None:
    engine = fast_engine(dtype, block_size=4)
    assert answers(engine) == alone(dtype)
    assert answers(engine) == alone(dtype)
    assert engine.stats.prefix_cache.hit_tokens > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_known_tokens_in_a_prefill_have_the_logprobs_that_they_had_as_decodes(dtype: torch.dtype) -> None:
    engine = fast_engine(dtype)
    known = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, alone(dtype), strict=True)]
    ids = [engine.add_request(tokens, max_tokens=1, temperature=0, prompt_logprobs=0) for tokens in known]
    outputs = run_to_end(engine)
    for request_id, (_, logprobs) in zip(ids, alone(dtype), strict=True):
        entries = outputs[request_id][-1].prompt_logprobs
        assert [entry.logprob for entry in entries[-MAX_TOKENS:]] == logprobs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_greedy_draws_give_the_same_tokens_whether_or_not_all_logits_are_computed(dtype: torch.dtype) -> None:
    """Where no draw of a step wants more than its best token, the head may find it without most of the logits."""
    head: Any = fast_model(dtype).lm_head
    assert (head.screen is not None) == multiplies_bytes()
    engine = fast_engine(dtype)
    ids = [engine.add_request(prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True) for prompt in PROMPTS]
    outputs = run_to_end(engine)
    whole = fast_engine(dtype)
    whole_ids = [
        whole.add_request(prompt, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
        for prompt in PROMPTS
    ]
    expected = run_to_end(whole)
    assert [answer_of(outputs[one][-1])[0] for one in ids] == [answer_of(expected[one][-1])[0] for one in whole_ids]


def test_a_model_that_finds_best_tokens_is_asked_only_where_they_are_all_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fast_model(torch.float32)
    asked: list[int] = []

    def best_tokens(hidden: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(len(hidden))
        best = model.logits(hidden).max(dim=1)
        return best.values, best.indices

    monkeypatch.setattr(model, "best_tokens", best_tokens)
    plain: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    for params, times in [
        ({}, 2),
        ({"n": 2}, 2),
        ({"logprobs": 0}, 0),
        ({"temperature": 0.5}, 0),
        ({"presence_penalty": 0.5}, 0),
        ({"min_tokens": 2}, 0),
    ]:
        asked.clear()
        engine = fast_engine(torch.float32)
        engine.add_request(PROMPTS[0], **{**plain, **params})
        run_to_end(engine)
        assert len(asked) == times, params


def test_a_row_that_is_not_a_number_fails_its_own_request_only() -> None:
    """The head finds nothing for such a row, so all logits are computed, and the sampler sees what is wrong."""
    load_kernels(home())
    model = tiny_transformer(seed=3)
    use_cpu_kernels(model)
    model.embed_tokens.weight.data[99] = math.nan  # the head has been packed before
    engine = make_engine(model, parts={"dtype": torch.float32, "kernels": True})
    plain: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    good = engine.add_request([5, 6, 7], **plain)
    bad = engine.add_request([5, 99, 7], **plain)
    outputs = run_to_end(engine)
    assert_quiet(engine)
    assert outputs[bad][-1].outputs[0].finish_reason == "error"
    assert outputs[good][-1].outputs[0].finish_reason == "length"
    alone = make_engine(model, parts={"dtype": torch.float32, "kernels": True})
    same = alone.add_request([5, 6, 7], **plain)
    assert answer_of(run_to_end(alone)[same][-1]) == answer_of(outputs[good][-1])

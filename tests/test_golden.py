"""SmolLM2 against the transformers library: the golden file, and one mode of the engine at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mini_vllm.engine.llm_engine import LLMEngine
from mini_vllm.outputs import RequestOutput
from mini_vllm.store.model_store import ModelFiles

LOGPROB_TOLERANCE = 1e-3
SHORT = 12  # tokens a prompt where a whole mode is compared

Golden = list[dict[str, Any]]


def run(engine: LLMEngine, golden: Golden, max_tokens: int | None = None, **params: Any) -> list[RequestOutput]:
    """All golden prompts together, greedy; each as long as its golden answer, or `max_tokens`."""
    ids = [
        engine.add_request(
            record["input"],
            temperature=0,
            max_tokens=min(len(record["greedy_token_ids"]), max_tokens or 10_000),
            **params,
        )
        for record in golden
    ]
    finished: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        finished.update((output.request_id, output) for output in engine.step() if output.finished)
    assert engine.stats.blocks.used == 0
    return [finished[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def float32_engine(smollm2_files: ModelFiles) -> Iterator[LLMEngine]:
    engine = LLMEngine(dtype="float32", max_model_len=1024, kv_cache_memory="1GiB", debug_checks=True)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def float32_outputs(float32_engine: LLMEngine, golden: Golden) -> list[RequestOutput]:
    return run(float32_engine, golden, logprobs=5, prompt_logprobs=0)


def test_prompt_token_ids_are_the_golden_ones(float32_outputs: list[RequestOutput], golden: Golden) -> None:
    assert [o.prompt_token_ids for o in float32_outputs] == [record["prompt_token_ids"] for record in golden]


def test_float32_tokens_texts_and_finish_reasons_are_the_golden_ones(
    float32_outputs: list[RequestOutput], golden: Golden
) -> None:
    for output, record in zip(float32_outputs, golden, strict=True):
        choice = output.outputs[0]
        assert choice.token_ids == record["greedy_token_ids"]
        assert choice.text == record["greedy_text"]
        assert choice.finish_reason == record["finish_reason"]


def test_float32_logprobs_are_within_a_thousandth(float32_outputs: list[RequestOutput], golden: Golden) -> None:
    for output, record in zip(float32_outputs, golden, strict=True):
        entries = output.outputs[0].logprobs
        assert entries is not None
        for entry, step in zip(entries, record["steps"], strict=True):
            ours = dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
            theirs = dict(zip(step["top_ids"], step["top_logprobs"], strict=True))
            assert ours == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)


def test_float32_prompt_logprobs_are_within_a_thousandth(float32_outputs: list[RequestOutput], golden: Golden) -> None:
    for output, record in zip(float32_outputs, golden, strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        ours = [entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None]
        assert ours == pytest.approx(record["prompt_logprobs"][1:], abs=LOGPROB_TOLERANCE)


def test_a_warm_prefix_cache_gives_the_golden_tokens(float32_engine: LLMEngine, golden: Golden) -> None:
    outputs = run(float32_engine, golden, SHORT)
    outputs = run(float32_engine, golden, SHORT)
    assert [o.outputs[0].token_ids for o in outputs] == [r["greedy_token_ids"][:SHORT] for r in golden]
    block_size = float32_engine.config.block_size
    assert [o.num_cached_tokens for o in outputs] == [
        (len(r["prompt_token_ids"]) - 1) // block_size * block_size for r in golden
    ]


MODES: dict[str, dict[str, Any]] = {
    "no cache": {"cache": "none"},
    "contiguous, one at a time": {"cache": "contiguous", "scheduling": "sequential", "num_kv_blocks": 1},
    "contiguous, static batches": {"cache": "contiguous", "scheduling": "static", "num_kv_blocks": 8},
    "contiguous, continuous": {"cache": "contiguous", "num_kv_blocks": 8},
    "paged, sequential": {"scheduling": "sequential"},
    "paged, static": {"scheduling": "static"},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 2048},
    "blocks of 4": {"block_size": 4, "num_kv_blocks": 512},
    "blocks of 64": {"block_size": 64, "num_kv_blocks": 64},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "chunks of 17": {"max_num_batched_tokens": 17},
    "no chunked prefill": {"enable_chunked_prefill": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool that preempts": {"num_kv_blocks": 18, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_gives_the_golden_tokens(smollm2_files: ModelFiles, golden: Golden, mode: str) -> None:
    options = {"num_kv_blocks": 256, "debug_checks": True, **MODES[mode]}
    # One at a time is slow: there a few prompts, raw and chat, and a few tokens are enough to compare.
    one_at_a_time = mode == "no cache" or options.get("scheduling") == "sequential"
    records, count = (golden[::5], 5) if one_at_a_time else (golden[::2], SHORT)
    engine = LLMEngine(dtype="float32", max_model_len=256, **options)
    outputs = run(engine, records, count)
    assert [o.outputs[0].token_ids for o in outputs] == [r["greedy_token_ids"][:count] for r in records]
    if mode == "a pool that preempts":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    engine.shutdown()


def test_bfloat16_agrees_wherever_the_margin_is_above_a_half(smollm2_files: ModelFiles, golden: Golden) -> None:
    """Each golden answer is fed back, so that one early difference does not decide the rest."""
    engine = LLMEngine(dtype="bfloat16", max_model_len=1024, num_kv_blocks=256, enable_prefix_caching=False)
    for record in golden:
        prompt, answer = record["prompt_token_ids"], record["greedy_token_ids"]
        request_id = engine.add_request([*prompt, *answer], max_tokens=0, prompt_logprobs=1)
        entries = None
        while not engine.is_finished(request_id):
            for output in engine.step():
                entries = output.prompt_logprobs
        assert entries is not None
        for entry, step in zip(entries[len(prompt) :], record["steps"], strict=True):
            margin = step["top_logprobs"][0] - step["top_logprobs"][1]
            assert entry is not None
            assert margin <= 0.5 or entry.top_token_ids[0] == step["id"]
    engine.shutdown()

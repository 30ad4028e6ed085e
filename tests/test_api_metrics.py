"""Counters and histograms against a clock and an engine whose steps are known."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_helpers import alphabet, serving
from engine_doubles import ScriptedModel, parts_for

from mini_vllm.api.metrics import EngineMetrics, Histogram, HttpMetrics
from mini_vllm.config import EngineConfig
from mini_vllm.engine.llm_engine import LLMEngine


class Clock:
    """Seconds that only pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(engine: LLMEngine, clock: Clock, metrics: EngineMetrics, step_seconds: float = 0.0) -> None:
    """Steps of `step_seconds`: the time passes inside the step, before its outputs are made."""
    process = engine._output_processor.process

    def slow_process(changes: object) -> object:
        clock.now += step_seconds
        return process(changes)  # type: ignore[arg-type]

    engine._output_processor.process = slow_process  # type: ignore[method-assign,assignment]
    while engine.has_unfinished_requests():
        metrics.observe(engine.step())
    engine._output_processor.process = process  # type: ignore[method-assign]


def summary(histogram: Histogram) -> tuple[int, float]:
    samples = {sample.name.rpartition("_")[2]: sample.value for sample in histogram.family("m").samples}
    return int(samples["count"]), samples["sum"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def engine_with(clock: Clock, **options: Any) -> LLMEngine:
    config = EngineConfig(num_kv_blocks=128, debug_checks=True, **options)
    return LLMEngine(config=config, parts=parts_for(ScriptedModel(alphabet), config), clock=clock)


def test_times_are_those_of_the_steps(clock: Clock) -> None:
    """One request of five tokens in steps of 0.5 s: first token after 0.5 s, four gaps, 2.5 s in all."""
    metrics, engine = EngineMetrics("m"), engine_with(clock)
    engine.add_request("ab", temperature=0, max_tokens=5)
    run(engine, clock, metrics, 0.5)
    assert summary(metrics.first_token) == (1, 0.5)
    assert summary(metrics.inter_token) == (4, 2.0)
    assert summary(metrics.whole) == (1, 2.5)
    assert summary(metrics.queue) == (1, 0.0) and summary(metrics.prefill) == (1, 0.5)
    assert summary(metrics.decode) == (1, 2.0)


def test_waiting_counts_to_the_first_token(clock: Clock) -> None:
    metrics, engine = EngineMetrics("m"), engine_with(clock, max_num_seqs=1)
    for _ in range(2):
        engine.add_request("ab", temperature=0, max_tokens=2)
    run(engine, clock, metrics, 1.0)
    assert summary(metrics.first_token) == (2, 1.0 + 3.0)
    assert summary(metrics.queue) == (2, 2.0)


def test_siblings_have_gaps_of_their_own(clock: Clock) -> None:
    metrics, engine = EngineMetrics("m"), engine_with(clock)
    engine.add_request("ab", temperature=0, max_tokens=3, n=2)
    run(engine, clock, metrics, 1.0)
    assert summary(metrics.first_token) == (1, 1.0)
    assert summary(metrics.inter_token) == (4, 4.0)
    assert summary(metrics.answer_sizes) == (1, 6.0) and summary(metrics.prompt_sizes) == (1, 2.0)


def test_an_aborted_request_counts_as_aborted_and_leaves_nothing(clock: Clock) -> None:
    metrics, engine = EngineMetrics("m"), engine_with(clock)
    request_id = engine.add_request("ab", temperature=0, max_tokens=50)
    metrics.observe(engine.step())
    engine.abort_request(request_id)
    run(engine, clock, metrics)
    assert metrics._finished["abort"] == 1 and metrics._live == {}


def test_buckets_rise_and_end_with_all() -> None:
    histogram = Histogram("x", "text", (1, 2, 5))
    for value in (0.5, 1, 1.5, 10):
        histogram.observe(value)
    buckets = {sample.labels["le"]: sample.value for sample in histogram.family("m").samples if "le" in sample.labels}
    assert buckets == {"1.0": 2, "2.0": 3, "5.0": 3, "+Inf": 4}


def test_counters_are_what_usage_says() -> None:
    with serving() as served:
        before = served.metrics()
        assert before["num_preemptions_total"] == 0 and before["prompt_tokens_total"] == 0
        answers = [
            served.complete(prompt, max_tokens=7, n=n) for prompt, n in itertools.product(("ab", "abc" * 9), (1, 3))
        ]
        served.complete("ab", max_tokens=0, echo=True)
        served.post("/v1/completions", {"prompt": "ab", "max_tokens": -1})
        after = served.metrics()
    usages = [answer["usage"] for answer in answers]
    assert after["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages) + 2
    assert after["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert after['request_success_total{finished_reason="length"}'] == after["request_started_total"] == 5
    assert after["prefix_cache_queries_total"] > 0 and after["kv_cache_usage_perc"] == 0
    assert after['http_requests_total{handler="/v1/completions",method="POST",status="400"}'] == 1


def test_invented_methods_make_no_new_series() -> None:
    metrics = HttpMetrics()
    for method in ("BREW", "WHEN", "GET"):
        metrics.count(method, "/health", 405)
    (family,) = metrics.families()
    assert {sample.labels["method"]: sample.value for sample in family.samples} == {"other": 2, "GET": 1}


def test_preemptions_are_counted() -> None:
    with serving(num_kv_blocks=6, max_num_seqs=4, parts={"max_model_len": 96}) as served:
        with ThreadPoolExecutor() as pool:
            futures = [pool.submit(served.complete, "x" * 20, max_tokens=40) for _ in range(4)]
            assert all(future.result(30)["usage"]["completion_tokens"] == 40 for future in futures)
        assert served.metrics()["num_preemptions_total"] > 0
        served.wait_until_quiet()


def test_the_dashboard_asks_only_for_series_that_there_are() -> None:
    dashboard = (Path(__file__).parent.parent / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8")
    with serving() as served:
        served.complete("ab", max_tokens=2)
        names = {name.partition("{")[0] for name in served.metrics()}
    asked = set(re.findall(r"mini_vllm:(\w+)", dashboard))
    assert len(asked) > 10 and asked <= names

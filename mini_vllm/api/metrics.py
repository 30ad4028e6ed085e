"""`/metrics`: counters and histograms under vLLM's names, with the prefix `mini_vllm:`.

Where it stands: `observe` is called in the engine's thread with the outputs of every step; `render` runs in the event
loop when somebody scrapes. Gauges are read from the engine at that moment, so they are right after any abort.

What always holds: a request that was handed in is counted once as started and once, by reason, as finished; started =
finished + the requests that are live. There is one writer, so nothing is locked.

In vLLM: `vllm/v1/metrics/loggers.py` and `vllm/v1/metrics/stats.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mini_vllm.engine.async_engine import AsyncLLMEngine
from mini_vllm.outputs import FinishReason, RequestOutput

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "mini_vllm:"

_SECONDS_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_SECONDS_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_SECONDS_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """Counts of values by upper bound.

    Args:
        name, text: of the series.
        bounds: upper bounds, rising; +Inf comes by itself.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name, self.text = PREFIX + name, text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, model: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], list(self._counts), strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(self.name, self.text, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


@dataclass
class _Live:
    """What is remembered of a request between its outputs. Times are of each choice's newest token."""

    token_times: dict[int, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_preemptions: int = 0


class EngineMetrics:
    """Counts what an engine does.

    Args:
        model: the served name, a label of every series.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.num_started = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._preemptions = 0
        self._finished: Counter[str] = Counter({str(reason): 0 for reason in FinishReason})
        self._live: dict[str, _Live] = {}
        self.first_token = Histogram("time_to_first_token_seconds", "From arrival to first token.", _SECONDS_TO_FIRST)
        self.inter_token = Histogram("inter_token_latency_seconds", "Between two tokens.", _SECONDS_BETWEEN)
        self.whole = Histogram("e2e_request_latency_seconds", "From arrival to the final output.", _SECONDS_WHOLE)
        self.queue = Histogram("request_queue_time_seconds", "From arrival to being scheduled first.", _SECONDS_WHOLE)
        self.prefill = Histogram("request_prefill_time_seconds", "From there to the first token.", _SECONDS_WHOLE)
        self.decode = Histogram("request_decode_time_seconds", "From first to last token.", _SECONDS_WHOLE)
        self.prompt_sizes = Histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.answer_sizes = Histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)

    # ---- the engine's thread ----------------------------------------------------------------------------------

    def observe(self, outputs: Sequence[RequestOutput]) -> None:
        """Count the outputs of one step."""
        for output in outputs:
            live = self._live.setdefault(output.request_id, _Live())
            self._count_tokens(output, live)
            self._preemptions += output.metrics.num_preemptions - live.num_preemptions
            live.num_preemptions = output.metrics.num_preemptions
            if output.finished:
                del self._live[output.request_id]
                self._count_finished(output, live)

    def _count_tokens(self, output: RequestOutput, live: _Live) -> None:
        now = output.metrics.last_token_time
        for choice in output.outputs:
            count = len(choice.delta_token_ids)
            if not count or now is None:
                continue
            if not live.num_tokens:
                self._prompt_tokens += len(output.prompt_token_ids)
                self.first_token.observe(output.metrics.time_to_first_token or 0.0)
            live.num_tokens += count
            self._generation_tokens += count
            earlier = live.token_times.get(choice.index)
            # Several tokens of one step arrive at once: between them no time passes.
            gaps = count - 1 if earlier is None else count
            for place in range(gaps):
                self.inter_token.observe(now - earlier if earlier is not None and place == 0 else 0.0)
            live.token_times[choice.index] = now

    def _count_finished(self, output: RequestOutput, live: _Live) -> None:
        metrics, reason = output.metrics, _finish_reason(output)
        self._finished[str(reason)] += 1
        if not live.num_tokens and reason is FinishReason.LENGTH:
            self._prompt_tokens += len(output.prompt_token_ids)  # max_tokens=0: the prompt was computed all the same
        if metrics.finished_time is not None:
            self.whole.observe(metrics.finished_time - metrics.arrival_time)
        if metrics.queue_time is not None and metrics.first_scheduled_time is not None:
            self.queue.observe(metrics.queue_time)
            if metrics.first_token_time is not None and metrics.last_token_time is not None:
                self.prefill.observe(metrics.first_token_time - metrics.first_scheduled_time)
                self.decode.observe(metrics.last_token_time - metrics.first_token_time)
        self.prompt_sizes.observe(len(output.prompt_token_ids))
        self.answer_sizes.observe(live.num_tokens)

    # ---- the event loop ---------------------------------------------------------------------------------------

    def families(self, engine: AsyncLLMEngine) -> Iterable[Metric]:
        """All series, with the engine's state of this moment."""
        stats = engine.stats
        yield self._gauge("num_requests_running", "Sequences that run.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait, preempted ones included.", stats.num_waiting)
        usage = stats.blocks.used / stats.blocks.total
        yield self._gauge("kv_cache_usage_perc", "Share of the blocks in use, 1 is all.", usage)
        cache = stats.prefix_cache
        queried, hit = (0, 0) if cache is None else (cache.queried_tokens, cache.hit_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queried)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", hit)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that got a token.", self._prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", self._generation_tokens)
        yield self._counter("num_preemptions", "Sequences that lost their blocks.", self._preemptions)
        yield self._counter("request_started", "Requests handed to the engine.", self.num_started)
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Finished requests by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            finished.add_metric([self.model, reason], count)
        yield finished
        for histogram in (self.first_token, self.inter_token, self.whole, self.queue, self.prefill, self.decode):
            yield histogram.family(self.model)
        yield self.prompt_sizes.family(self.model)
        yield self.answer_sizes.family(self.model)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self.model], value)
        return family


class HttpMetrics:
    """Counts answers by route and status."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, str, int]] = Counter()

    def count(self, method: str, route: str, status: int) -> None:
        known = method if method in _METHODS else "other"  # a client may invent methods; series must stay few
        self._answers[known, route, status] += 1

    def families(self) -> Iterable[Metric]:
        family = CounterMetricFamily("http_requests", "Answers by status.", labels=["method", "handler", "status"])
        for (method, route, status), count in self._answers.items():
            family.add_metric([method, route, str(status)], count)
        yield family


def render(families: Iterable[Metric]) -> bytes:
    """Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Once(list(families)))
    return generate_latest(registry)


class _Once:
    """A collector of families that are there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        return []  # so that the registry does not collect once more just for the names

    def collect(self) -> list[Metric]:
        return self._families


def _finish_reason(output: RequestOutput) -> FinishReason:
    """The one that counts for a request: the worst of its choices'."""
    reasons = {choice.finish_reason for choice in output.outputs}
    order = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH)
    return next((reason for reason in order if reason in reasons), FinishReason.STOP)

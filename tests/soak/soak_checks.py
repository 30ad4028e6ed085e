"""What must be true of an answer, and of the counters after a soak."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from traffic import Plan

if TYPE_CHECKING:
    from soak import Seen

REASONS = ("stop", "length", "abort", "error")


def check_text_answer(plan: Plan, lines: list[str], seen: Seen) -> None:
    """The answer to a request for text is whole; count what it says. AssertionError otherwise."""
    reasons, usage, tokens = _streamed(plan, lines) if plan.is_streamed else _whole(lines)
    assert sorted(reasons) == list(range(plan.num_choices)), f"choices {sorted(reasons)}"
    assert set(reasons.values()) <= {"stop", "length"}, reasons
    n = plan.num_choices // plan.num_prompts
    for prompt in range(plan.num_prompts):
        of_prompt = {reasons[prompt * n + index] for index in range(n)}
        seen.finished["length" if "length" in of_prompt else "stop"] += 1
    seen.prompt_tokens += usage["prompt_tokens"]
    seen.completion_tokens += usage["completion_tokens"]
    seen.choices_with_tokens += plan.num_choices  # max_tokens is at least 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert tokens is None or tokens == usage["completion_tokens"]


def _whole(lines: list[str]) -> tuple[dict[int, str], dict[str, int], int | None]:
    answer = json.loads("\n".join(lines))
    choices = answer.get("choices", answer.get("outputs"))
    tokens = [len(choice["token_ids"]) for choice in choices if choice.get("token_ids") is not None]
    counted = sum(tokens) if len(tokens) == len(choices) else None
    return {choice["index"]: choice["finish_reason"] for choice in choices}, answer["usage"], counted


def _streamed(plan: Plan, lines: list[str]) -> tuple[dict[int, str], dict[str, int], int | None]:
    assert all(not line or line.startswith(("data: ", ": ")) for line in lines), "a line that is no event's"
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    reasons: dict[int, str] = {}
    tokens, usage = 0, None
    for event in map(json.loads, data[:-1]):
        assert usage is None, "an event after the token counts"
        assert "error" not in event, event
        choices: list[dict[str, Any]] = event.get("choices", [event] if "index" in event else [])
        for choice in choices:
            assert choice["index"] not in reasons, "an event after the end of its choice"
            tokens += len(choice.get("token_ids") or ())
            if choice["finish_reason"] is not None:
                reasons[choice["index"]] = choice["finish_reason"]
        if not choices:
            usage = event["usage"]
    assert usage is not None, "no token counts"
    assert isinstance(plan.body, dict)
    return reasons, usage, tokens if plan.body.get("return_token_ids") else None


def samples(text: str) -> dict[str, float]:
    """Samples of /metrics by name and labels, without the prefix and the model's name."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.replace('model_name="tiny",', "").replace(',model_name="tiny"', "")
            found[name.replace('{model_name="tiny"}', "").removeprefix("mini_vllm:")] = float(value)
    return found


def _finished(metrics: dict[str, float]) -> dict[str, float]:
    return {reason: metrics[f'request_success_total{{finished_reason="{reason}"}}'] for reason in REASONS}


def check_counters(before: dict[str, float], metrics: dict[str, float], seen: Seen) -> list[str]:
    """While clients leave, nobody outside knows exactly what was computed; but sums and bounds are known.

    Args:
        before: the counters when the clients began.
        metrics: the counters now that all of them have ended.
    """
    problems: list[str] = []

    def must(holds: bool, what: str) -> None:
        if not holds:
            problems.append(what)

    finished = _finished(metrics)
    started = metrics["request_started_total"]
    must(started == sum(finished.values()), f"{started:.0f} started, finished {finished}")
    must(finished["error"] == 0, f"{finished['error']:.0f} computations failed")
    earlier = _finished(before)
    over = {reason: finished[reason] - earlier[reason] - seen.finished[reason] for reason in ("stop", "length")}
    must(min(over.values()) >= 0, f"clients saw more than was counted: {seen.finished}, counted {finished}")
    must(
        sum(over.values()) + finished["abort"] <= seen.num_left,
        f"{seen.num_left} left behind, but counted {finished} and seen {seen.finished}",
    )
    must(metrics["e2e_request_latency_seconds_count"] == started, "a whole time for each request")
    must(metrics["request_prompt_tokens_count"] == started, "a prompt size for each request")
    must(metrics["request_generation_tokens_sum"] == metrics["generation_tokens_total"], "sizes of answers, summed")
    must(metrics["request_prompt_tokens_sum"] >= metrics["prompt_tokens_total"], "prompt tokens are of prompts")
    must(metrics["prompt_tokens_total"] >= seen.prompt_tokens, "prompt tokens that clients saw")
    must(metrics["generation_tokens_total"] >= seen.completion_tokens, "tokens that clients saw")
    must(metrics["inter_token_latency_seconds_count"] < metrics["generation_tokens_total"], "gaps between tokens")
    must(metrics["prefix_cache_hits_total"] <= metrics["prefix_cache_queries_total"], "hits are found by queries")
    loading = _by_status(before)
    for status, total in _by_status(metrics).items():
        count = total - loading.get(status, 0)  # earlier there were 503s of /health, while the model was loading
        must(status < 500 or not count, f"{count:.0f} answers of status {status}")
        if status in (400, 404, 413, 429):
            saw = seen.statuses[status]
            must(saw <= count <= saw + seen.num_unanswered, f"status {status}: {count:.0f} counted, {saw} seen")
    must(metrics["num_preemptions_total"] > 0, "nobody was preempted: the pool is too large for this test")
    return problems


def check_exact_counters(before: dict[str, float], after: dict[str, float], seen: Seen) -> list[str]:
    """When every answer is read to its end, everything is known."""
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    num_prompts = sum(seen.finished.values())
    expected = {
        "request_started_total": num_prompts,
        "prompt_tokens_total": seen.prompt_tokens,
        "generation_tokens_total": seen.completion_tokens,
        "inter_token_latency_seconds_count": seen.completion_tokens - seen.choices_with_tokens,
        "time_to_first_token_seconds_count": num_prompts,
        "e2e_request_latency_seconds_count": num_prompts,
        "request_queue_time_seconds_count": num_prompts,
        "request_prefill_time_seconds_count": num_prompts,
        "request_decode_time_seconds_count": num_prompts,
        "request_generation_tokens_sum": seen.completion_tokens,
        **{f'request_success_total{{finished_reason="{reason}"}}': seen.finished[reason] for reason in REASONS},
    }
    return [
        f"{name} has grown by {grown[name]:.0f}, should be {value}"
        for name, value in expected.items()
        if grown[name] != value
    ]


def _by_status(metrics: dict[str, float]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for name, value in metrics.items():
        if name.startswith("http_requests_total"):
            status = int(name.partition('status="')[2].partition('"')[0])
            counts[status] = counts.get(status, 0) + value
    return counts

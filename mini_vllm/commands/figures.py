"""The figures of an answer: how many tokens, how soon, how fast.

Where it stands: read from the final `RequestOutput` of a request; shown on stderr after an answer and kept in the
JSON lines.

In vLLM: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_vllm.outputs import RequestOutput


@dataclass(frozen=True)
class Figures:
    """Counts in tokens, times in seconds.

    Args:
        num_prompt_tokens: of which `num_cached_tokens` came from the prefix cache.
        num_output_tokens: of all choices together, the ending token included.
        time_to_first_token: from the arrival of the request; None if there was no token.
        tokens_per_second: of all choices together, after the first token of each; None where there was no second one.
        total_time: from the arrival to the end.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token: float | None
    tokens_per_second: float | None
    total_time: float | None

    def line(self) -> str:
        """`5 tokens in, 16 out, first after 0.03 s, 105.2 tokens/s`."""
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        parts = [f"{self.num_prompt_tokens} tokens in{cached}", f"{self.num_output_tokens} out"]
        if self.time_to_first_token is not None:
            parts.append(f"first after {self.time_to_first_token:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        return ", ".join(parts)


def figures_of(output: RequestOutput) -> Figures:
    """The figures of a request that has finished."""
    metrics = output.metrics
    num_output_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    speed = None
    if metrics.first_token_time is not None and metrics.last_token_time is not None:
        seconds = metrics.last_token_time - metrics.first_token_time
        num_later_tokens = num_output_tokens - len(output.outputs)
        speed = num_later_tokens / seconds if seconds > 0 else None
    return Figures(
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        num_output_tokens=num_output_tokens,
        time_to_first_token=metrics.time_to_first_token,
        tokens_per_second=speed,
        total_time=None if metrics.finished_time is None else metrics.finished_time - metrics.arrival_time,
    )

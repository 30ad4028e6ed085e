"""Do two modes of the engine give the same answers? A benchmark whose modes disagree compares two different things.

Where it stands: the ladder asks after every rung.

Greedy tokens are equal in every mode up to rounding: batches of another shape add in another order, which in float32
moves a logit by about 1e-5. Where the two best tokens are closer than `NEAR_TIE`, either may win, and what follows is
another text. So the first token that differs is looked at: a near tie is counted and reported, anything else is a bug
and the run is refused.

In vLLM: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.benchmark.records import BenchmarkError
from mini_vllm.benchmark.runner import Bench
from mini_vllm.benchmark.workload import Workload

NEAR_TIE = 1e-3  # difference of two logprobs; a hundred times what rounding moves, as in the tests

Answers = Sequence[tuple[int, ...]]


def count_near_ties(bench: Bench, workload: Workload, expected: Answers, got: Answers, names: tuple[str, str]) -> int:
    """How many requests part at a near tie; requests that only one side ran are left out.

    Args:
        bench: an engine to ask how close the two tokens were.
        names: of the two modes, for the message.

    Raises:
        BenchmarkError: a request parts where the best token was clearly better.
    """
    num_ties = 0
    for place, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one == other:
            continue
        position = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        if position is None:
            raise BenchmarkError(f"request {place + 1} has {len(one)} tokens in {names[0]}, {len(other)} in {names[1]}")
        prompt = [*workload.items[place].prompt_token_ids, *one[:position]]
        if (gap := _gap(bench, prompt, (one[position], other[position]))) >= NEAR_TIE:
            raise BenchmarkError(
                f"{names[0]!r} and {names[1]!r} give different answers: request {place + 1}, output token {position}: "
                f"{one[position]} and {other[position]}, whose logprobs are {gap:.2g} apart; the run does not count"
            )
        num_ties += 1
    return num_ties


def _gap(bench: Bench, prompt: list[int], tokens: tuple[int, int]) -> float:
    """How far apart the logprobs of two tokens are after a prompt; infinite if one is not among the best five."""
    request_id = bench.engine.add_request(prompt, temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=5)
    final = None
    while not bench.engine.is_finished(request_id):
        for output in bench.engine.step():
            final = output
    logprobs = final.outputs[0].logprobs if final is not None and final.outputs else None
    if not logprobs:
        raise BenchmarkError("the engine gave no logprobs for the token at which two modes part")
    best = dict(zip(logprobs[0].top_token_ids, logprobs[0].top_logprobs, strict=True))
    return abs(best[tokens[0]] - best[tokens[1]]) if set(tokens) <= set(best) else float("inf")

"""A scheduling policy of your own: the shortest prompt goes first.

A policy is a class with one method. Give it to the engine as `policy="module:Class"`; or on the command line, with this
folder on the path:

    PYTHONPATH=examples mini-vllm generate --policy shortest_first_policy:ShortestPromptFirst "..." "..."

The price of this one: under a steady flow of short prompts a long one never starts. `fcfs` cannot do that.
"""

from __future__ import annotations

from typing import Any

from mini_vllm import LLMEngine
from mini_vllm.engine.sequence import Sequence


class ShortestPromptFirst:
    """Orders sequences by the length of their prompt; equal ones go in order of arrival, as everywhere."""

    def key(self, sequence: Sequence) -> tuple[Any, ...]:
        return (len(sequence.group.request.prompt_token_ids),)


def main() -> None:
    engine = LLMEngine(policy="shortest_first_policy:ShortestPromptFirst", max_num_seqs=1)
    prompts = ["A rather long prompt, which came first and yet has to wait", "A short one", "Hi"]
    prompt_of = {engine.add_request(prompt, max_tokens=8, temperature=0): prompt for prompt in prompts}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                print(f"{prompt_of[output.request_id]!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()

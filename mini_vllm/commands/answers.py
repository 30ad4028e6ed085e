"""Answers on stdout, in the order of their prompts, while all of them are generated together.

    prompt 0   ####|####|##.                      shown as it comes
    prompt 1   ###|####.                          kept until 0 has ended, then shown at once, finished or not
    prompt 2   ##|####|####|###...                kept until 1 has ended

Where it stands: `generate` pushes every output of `LLMEngine.step` into one of the two writers.

What always holds: the text on stdout is each answer followed by one line break, and nothing else.

In vLLM: nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

from mini_vllm.commands.figures import figures_of
from mini_vllm.commands.prompts import GivenPrompt
from mini_vllm.commands.terminal import Terminal
from mini_vllm.json_text import json_line
from mini_vllm.outputs import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs


class AnswerWriter(Protocol):
    """Takes the outputs of all requests as they come."""

    def push(self, prompt_index: int, output: RequestOutput) -> None:
        """An output of the request for that prompt."""
        ...


class TextWriter:
    """Streams the answers as text, with a line of figures on stderr after each prompt's.

    Args:
        num_prompts: how many requests there are.
        num_choices: answers to each.
        terminal: where the figures go.
    """

    def __init__(self, num_prompts: int, num_choices: int, terminal: Terminal) -> None:
        self._num_choices = num_choices
        self._terminal = terminal
        # One place an answer: the choices of prompt 0, then those of prompt 1, ...
        self._kept = [""] * (num_prompts * num_choices)
        self._ended = [False] * (num_prompts * num_choices)
        self._current = 0
        self._finals: dict[int, RequestOutput] = {}

    def push(self, prompt_index: int, output: RequestOutput) -> None:
        first = prompt_index * self._num_choices
        for choice in output.outputs:
            self._kept[first + choice.index] += choice.delta_text
            self._ended[first + choice.index] = choice.finish_reason is not None
        if output.finished:  # an error may have come before there were choices
            self._finals[prompt_index] = output
            self._ended[first : first + self._num_choices] = [True] * self._num_choices
        self._show()

    def _show(self) -> None:
        """Print what the current answer has, and go on to the next one where it has ended."""
        while self._current < len(self._kept):
            text, self._kept[self._current] = self._kept[self._current], ""
            has_ended = self._ended[self._current]
            if text or has_ended:
                print(text, end="\n" if has_ended else "", flush=True)
            if not has_ended:
                return
            self._current += 1
            if self._current % self._num_choices == 0:
                self._show_figures(self._finals[self._current // self._num_choices - 1])

    def _show_figures(self, output: RequestOutput) -> None:
        reached_max_tokens = any(choice.finish_reason == FinishReason.LENGTH for choice in output.outputs)
        self._terminal.note(figures_of(output).line() + (", cut by max_tokens" if reached_max_tokens else ""))


class JsonWriter:
    """One JSON object a line and an answer, written when the answer and all before it have ended.

    Args:
        prompts: as given; they are repeated in the lines.
    """

    def __init__(self, prompts: list[GivenPrompt]) -> None:
        self._prompts = prompts
        self._finals: dict[int, RequestOutput] = {}
        self._current = 0

    def push(self, prompt_index: int, output: RequestOutput) -> None:
        if output.finished:
            self._finals[prompt_index] = output
        while (final := self._finals.pop(self._current, None)) is not None:
            for choice in final.outputs:
                line = {"index": self._current, "prompt": self._prompts[self._current], **_as_json(final, choice)}
                print(json_line(line), flush=True)
            self._current += 1


def _as_json(output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    figures = figures_of(output)
    fields: dict[str, Any] = {
        "choice": choice.index,
        "text": choice.text,
        "finish_reason": None if choice.finish_reason is None else str(choice.finish_reason),
        "stop_reason": choice.stop_reason,
        "num_prompt_tokens": figures.num_prompt_tokens,
        "num_cached_tokens": figures.num_cached_tokens,
        "num_output_tokens": len(choice.token_ids),
        "metrics": {
            "queue_time": output.metrics.queue_time,
            "time_to_first_token": figures.time_to_first_token,
            "tokens_per_second": figures.tokens_per_second,
            "total_time": figures.total_time,
            "num_preemptions": output.metrics.num_preemptions,
        },
    }
    if output.error is not None:
        fields["error"] = output.error
    if choice.logprobs is not None:
        fields["token_ids"] = choice.token_ids
        fields["logprobs"] = [_logprobs_as_json(entry) for entry in choice.logprobs]
    if output.prompt_logprobs is not None:
        fields["prompt_token_ids"] = output.prompt_token_ids
        fields["prompt_logprobs"] = [_logprobs_as_json(entry) for entry in output.prompt_logprobs]
    return fields


def _logprobs_as_json(entry: TokenLogprobs | None) -> dict[str, Any] | None:
    """JSON has no infinity: -inf is written -9999.0, as over HTTP."""
    if entry is None:
        return None
    return {
        "token_id": entry.token_id,
        "logprob": max(entry.logprob, -9999.0),
        "top_token_ids": list(entry.top_token_ids),
        "top_logprobs": [max(logprob, -9999.0) for logprob in entry.top_logprobs],
    }

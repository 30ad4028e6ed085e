"""Where a step's time goes: an observer at the engine's events and around its model.

    StepStarted .. StepScheduled .. model called .. first logits .. StepExecuted .. StepFinished
          schedule |     prepare    |   forward   |    sample     |    output

Where it stands: between the engine and the runner. The engine knows nothing of it.

What always holds: the five parts of a step add up to the time between its first and its last event.

In vLLM: nothing; `IterationStats` in `vllm/v1/metrics/stats.py` comes nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mini_vllm.engine import events
from mini_vllm.model.language_model import FindsBestTokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mini_vllm.model.attention import AttentionLayerSpec, StepAttention
    from mini_vllm.model.language_model import LanguageModel

PARTS = ("schedule", "prepare", "forward", "sample", "output")


@dataclass(frozen=True)
class StepTimes:
    """Where one step's time went, in seconds.

    Args:
        schedule: choosing the work and its blocks.
        prepare: token ids, positions, block tables and slots into tensors, and the attention's plan.
        forward: the transformer.
        sample: logits, the choice of tokens, and their way back to plain numbers; 0 in a step that draws none.
        output: committing tokens, detokenising, stop conditions.
        num_tokens: computed in the step.
        num_decodes: sequences that computed one new token behind a finished prompt.
        num_prefills: sequences that computed some of their prompt.
    """

    schedule: float
    prepare: float
    forward: float
    sample: float
    output: float
    num_tokens: int
    num_decodes: int
    num_prefills: int

    @property
    def total(self) -> float:
        return self.schedule + self.prepare + self.forward + self.sample + self.output


class StepObserver:
    """Listens to the engine and stands around its model, to take the times of every step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: dict[str, float] = {}
        self._scheduled: tuple[events.SequenceScheduled, ...] = ()
        self.steps: list[StepTimes] = []

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.StepStarted):
            self._marks = {"started": self._clock()}
        elif isinstance(event, events.StepScheduled):
            self._marks["scheduled"] = self._clock()
            self._scheduled = event.sequences
        elif isinstance(event, events.StepExecuted):
            self._marks["executed"] = self._clock()
        elif isinstance(event, events.StepFinished):
            self._finish(self._clock())

    def mark(self, name: str) -> None:
        """Something begins inside the model; only its first time in a step counts."""
        self._marks.setdefault(name, self._clock())

    def _finish(self, now: float) -> None:
        marks = self._marks
        # An executor whose model is elsewhere marks nothing inside: all of its time is `forward` then.
        prepared = marks.get("forward", marks["scheduled"])
        forwarded = marks.get("logits", marks["executed"])
        num_prefills = sum(one.is_prefill for one in self._scheduled)
        self.steps.append(
            StepTimes(
                schedule=marks["scheduled"] - marks["started"],
                prepare=prepared - marks["scheduled"],
                forward=forwarded - prepared,
                sample=marks["executed"] - forwarded,
                output=now - marks["executed"],
                num_tokens=sum(one.num_new_tokens for one in self._scheduled),
                num_decodes=len(self._scheduled) - num_prefills,
                num_prefills=num_prefills,
            )
        )


class TimedModel:
    """A language model that tells an observer when the forward pass and when the logits begin."""

    def __init__(self, model: LanguageModel, observer: StepObserver) -> None:
        self._model = model
        self._observer = observer

    @property
    def layer_specs(self) -> list[AttentionLayerSpec]:
        return self._model.layer_specs

    def settle_context(self, max_model_len: int) -> None:
        self._model.settle_context(max_model_len)

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        self._observer.mark("forward")
        return self._model(input_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        self._observer.mark("logits")
        return self._model.logits(hidden)

    def best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        self._observer.mark("logits")
        return self._model.best_tokens(hidden) if isinstance(self._model, FindsBestTokens) else None

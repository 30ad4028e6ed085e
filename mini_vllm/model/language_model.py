"""`LanguageModel`: all that the rest of the engine asks of a model.

Where it stands: the border between worker and model. `Transformer` is one; so is a test double with scripted logits.

In vLLM: `VllmModelForTextGeneration` in `vllm/model_executor/models/interfaces_base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from mini_vllm.model.attention import AttentionLayerSpec, StepAttention


class LanguageModel(Protocol):
    """Token ids in, hidden states out, and logits only for the rows that someone needs."""

    @property
    def layer_specs(self) -> list[AttentionLayerSpec]:
        """What the attention backend must know of each layer."""
        ...

    def settle_context(self, max_model_len: int) -> None:
        """Told once, before the first step: how many tokens the longest sequence can have.

        For what depends on it and must not change while keys lie in a cache; most models have no such thing.
        """
        ...

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """[T] token ids and their positions, flat over all sequences -> [T, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] float32."""
        ...


@runtime_checkable
class FindsBestTokens(Protocol):
    """A model, or a model's head, that may know the greatest logit of a row without computing the others."""

    def best_tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """[R, hidden_size] -> the greatest logit of each row [R] float32 and its first token [R] int64.

        The same bits as `logits` and its maximum. None where all logits must be computed to tell.
        """
        ...


class ModelDescription(Protocol):
    """What the engine asks of a model's configuration, whoever implements the model. `ModelConfig` is one."""

    @property
    def architecture(self) -> str:
        """The class name that the checkpoint gives."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to vocab_size - 1."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """The longest context in tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every end-of-sequence id that the configuration names."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided while reading, one sentence each; the engine logs them at start."""
        ...


@dataclass(frozen=True)
class ModelSummary:
    """The `ModelDescription` of a model that is not the native transformer. Fields as there."""

    architecture: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()

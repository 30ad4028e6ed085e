"""What the sampler's tests share: batches written draw by draw, exact survivors, and a chi-square test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from mini_vllm.model import sampling_draw
from mini_vllm.model.sampler import SamplerOutput, SamplerSteps, sample
from mini_vllm.model.sampling_batch import PenaltyHistory, SamplingBatch, TokenPairs, WorkedDraws, group_draws

# How `run` samples: plain PyTorch if None. `test_cpu_sampler.py` puts the fast steps here and runs the same tests.
STEPS: SamplerSteps | None = None


@dataclass(frozen=True)
class OneDraw:
    """One draw with all that can be said of it. `grammar` holds the tokens that a grammar lets through."""

    row: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    sample_index: int = 0
    position: int = 0
    num_logprobs: int = -1
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed: Sequence[int] = ()
    forbidden: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Sequence[int] | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_plain(self) -> bool:
        adjusted = self.has_penalties or self.allowed or self.forbidden or self.bias or self.grammar is not None
        return self.temperature == 0 and not adjusted


def make_batch(draws: Sequence[OneDraw], vocab_size: int) -> SamplingBatch:
    wanting = [index for index, one in enumerate(draws) if one.num_logprobs >= 0]
    working = [index for index, one in enumerate(draws) if not one.is_plain]
    return SamplingBatch(
        rows=torch.tensor([one.row for one in draws]),
        worked=worked_draws([draws[i] for i in working], vocab_size, torch.tensor(working)) if working else None,
        num_logprobs=max(one.num_logprobs for one in draws),
        logprob_draws=None if len(wanting) == len(draws) else torch.tensor(wanting),
    )


def worked_draws(draws: Sequence[OneDraw], vocab_size: int, indexes: Tensor | None = None) -> WorkedDraws:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(one, name) for one in draws], dtype)

    parameters = {"temperature": np.float32, "top_k": np.int64, "top_p": np.float32, "min_p": np.float32}
    dense = {name: column(name, dtype) for name, dtype in parameters.items()}
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return WorkedDraws(
        draws=torch.arange(len(draws)) if indexes is None else indexes,
        **{name: torch.from_numpy(values) for name, values in dense.items()},
        **{name: torch.from_numpy(column(name, np.float32)) for name in penalties},
        seeds=torch.from_numpy(column("seed", np.int64)),
        sample_index=torch.from_numpy(column("sample_index", np.int64)),
        positions=torch.from_numpy(column("position", np.int64)),
        groups=group_draws(**dense, vocab_size=vocab_size, device=torch.device("cpu")),
        history=_history(draws, vocab_size),
        allowed=_pairs([(place, token, 0.0) for place, one in enumerate(draws) for token in one.allowed]),
        forbidden=_pairs([(place, token, 0.0) for place, one in enumerate(draws) for token in one.forbidden]),
        bias=_pairs([(place, token, value) for place, one in enumerate(draws) for token, value in one.bias.items()]),
        grammar_mask=_grammar_mask(draws, vocab_size),
    )


def _pairs(entries: list[tuple[int, int, float]]) -> TokenPairs | None:
    return TokenPairs(*(torch.tensor(column) for column in zip(*entries, strict=True))) if entries else None


def _history(draws: Sequence[OneDraw], vocab_size: int) -> PenaltyHistory | None:
    places = [place for place, one in enumerate(draws) if one.has_penalties]
    if not places:
        return None
    prompts, outputs = (
        torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(list(getattr(draws[place], name)), dtype=torch.int64) for place in places],
            batch_first=True,
            padding_value=vocab_size,
        )
        for name in ("prompt", "output")
    )
    return PenaltyHistory(torch.tensor(places), prompts, outputs)


def _grammar_mask(draws: Sequence[OneDraw], vocab_size: int) -> Tensor | None:
    if all(one.grammar is None for one in draws):
        return None
    words = np.zeros((len(draws), -(-vocab_size // 32)), np.uint32)
    for row, one in zip(words, draws, strict=True):
        for token in range(vocab_size) if one.grammar is None else one.grammar:
            row[token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(words.view(np.int32))


def run(logits: Tensor | Sequence[float], *draws: OneDraw) -> SamplerOutput:
    """Sample from [R, vocabulary], or from one row given as numbers."""
    rows = torch.as_tensor(logits, dtype=torch.float32)
    rows = rows[None] if rows.dim() == 1 else rows
    return sample(rows, make_batch(draws, rows.shape[1]), STEPS)


def tokens(logits: Tensor | Sequence[float], *draws: OneDraw) -> list[int]:
    found: list[int] = run(logits, *draws).token_ids.tolist()
    return found


def survivors(logits: Tensor | Sequence[float], monkeypatch: pytest.MonkeyPatch, **fields: object) -> set[int]:
    """Exactly the tokens that can be drawn.

    One draw a token, and noise that pulls draw number t to token t with a force that beats any finite logit: draw t
    gives t if, and only if, t is still there.
    """
    vocab_size = len(torch.as_tensor(logits))

    def pull(seeds: Tensor, sample_index: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        return (token_ids == positions[:, None]).float() * 1e9

    with monkeypatch.context() as patch:
        patch.setattr(sampling_draw, "gumbel_noise", pull)
        draws = [OneDraw(position=token, **fields) for token in range(vocab_size)]  # type: ignore[arg-type]
        drawn = tokens(logits, *draws)
    return {token for token in range(vocab_size) if drawn[token] == token}


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """Probability of counts at least as far from `probabilities` as these, if they came from them (Pearson 1900)."""
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    assert expected.min() >= 5, "too few numbers for a chi-square test"
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()

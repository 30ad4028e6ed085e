"""The sampler against the logits processors of the transformers library, in the order of design.md."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from sampler_helpers import OneDraw, survivors, worked_draws
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_vllm.model.sampling_adjustments import adjust

VOCAB_SIZE = 700


def random_logits(seed: int, scale: float) -> Tensor:
    return torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def survivors_by_transformers(logits: Tensor, fields: dict[str, Any]) -> set[int]:
    """Temperature, min_p, top_k, top_p: each only where it does something, as transformers itself does."""
    warpers = [TemperatureLogitsWarper(fields.get("temperature", 1.0))]
    if fields.get("min_p", 0.0) > 0:
        warpers.append(MinPLogitsWarper(fields["min_p"]))
    if fields.get("top_k", 0) > 0:
        warpers.append(TopKLogitsWarper(fields["top_k"]))
    if fields.get("top_p", 1.0) < 1:
        warpers.append(TopPLogitsWarper(fields["top_p"]))
    nothing = torch.zeros(1, 0, dtype=torch.int64)
    for warper in warpers:
        logits = warper(nothing, logits)
    return set(logits[0].isfinite().nonzero().flatten().tolist())


SINGLE = [{"top_k": k} for k in (1, 2, 50, 699, 700)]
SINGLE += [{"top_p": p} for p in (0.01, 0.5, 0.9, 0.99)] + [{"min_p": p} for p in (0.001, 0.1, 0.9)]
COMBINED = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in product((0.5, 1.7), (0, 40), (0.8, 1.0), (0.0, 0.02))
]


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("fields", SINGLE + COMBINED, ids=str)
def test_the_same_tokens_survive(fields: dict[str, Any], scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(seed=int(scale * 10), scale=scale)
    expected = survivors_by_transformers(logits, fields)
    assert survivors(logits[0], monkeypatch, **fields) == expected


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_the_repetition_penalty_gives_the_same_logits(penalty: float) -> None:
    """Transformers penalises what stands in the input ids: prompt and output together."""
    logits = random_logits(seed=1, scale=3.0)
    history = torch.randint(VOCAB_SIZE, (1, 60), generator=torch.Generator().manual_seed(2))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone())
    one = OneDraw(repetition_penalty=penalty, prompt=history[0, :25].tolist(), output=history[0, 25:].tolist())
    found = adjust(logits.clone(), worked_draws([one], VOCAB_SIZE))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)

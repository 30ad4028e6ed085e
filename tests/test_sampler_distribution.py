"""Draws come from the distribution that the parameters describe: chi-square over 20,000 draws of one batched call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampler_helpers import OneDraw, chi_square_p, run
from torch import Tensor

NUM_DRAWS = 20_000
PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.1, 0.3])
LOGITS = PROBABILITIES.log()


def counts_of(varied: str, **fields: Any) -> Tensor:
    """How often each token came, over draws that differ in `varied` alone."""
    draws = [OneDraw(**{varied: number, **fields}) for number in range(NUM_DRAWS)]
    return torch.bincount(run(LOGITS, *draws).token_ids, minlength=len(LOGITS))


CASES: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [0.05, 0.4, 0.15, 0.1, 0.3]),
    ({"temperature": 0.5}, [0.05**2, 0.4**2, 0.15**2, 0.1**2, 0.3**2]),
    ({"temperature": 2.0}, [0.05**0.5, 0.4**0.5, 0.15**0.5, 0.1**0.5, 0.3**0.5]),
    ({"top_k": 3}, [0, 0.4, 0.15, 0, 0.3]),
    ({"top_p": 0.6}, [0, 0.4, 0, 0, 0.3]),
    ({"top_p": 0.99}, [0.05, 0.4, 0.15, 0.1, 0.3]),
    ({"min_p": 0.3}, [0, 0.4, 0.15, 0, 0.3]),
    ({"temperature": 2.0, "min_p": 0.4, "top_k": 4, "top_p": 0.8}, [0, 0.4**0.5, 0.15**0.5, 0, 0.3**0.5]),
    ({"bias": {0: 2.0794415}}, [0.4, 0.4, 0.15, 0.1, 0.3]),  # ln 8
    ({"forbidden": [1], "temperature": 0.5}, [0.05**2, 0, 0.15**2, 0.1**2, 0.3**2]),
    ({"allowed": [2, 3]}, [0, 0, 0.15, 0.1, 0]),
    # logits of probabilities are negative, so a repetition penalty of 2 squares them
    ({"repetition_penalty": 2.0, "prompt": [1], "output": [4]}, [0.05, 0.4**2, 0.15, 0.1, 0.3**2]),
    ({"presence_penalty": 0.6931472, "output": [1, 1]}, [0.05, 0.2, 0.15, 0.1, 0.3]),  # ln 2
    ({"frequency_penalty": 0.6931472, "output": [1, 1], "temperature": 0.5}, [0.05**2, 0.1**2, 0.15**2, 0.1**2, 0.09]),
]


@pytest.mark.parametrize(("fields", "weights"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_tokens_are_drawn_as_often_as_their_probability_says(fields: dict[str, Any], weights: list[float]) -> None:
    counts, expected = counts_of("position", **fields), torch.tensor(weights)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert chi_square_p(counts[possible], expected[possible]) > 1e-4


@pytest.mark.parametrize("varied", ["seed", "sample_index", "position"])
def test_each_part_of_the_key_gives_fresh_draws(varied: str) -> None:
    """F29, F42: other seeds, siblings and positions are draws of their own."""
    assert chi_square_p(counts_of(varied), PROBABILITIES) > 1e-4


@pytest.mark.parametrize("varied", ["seed", "sample_index", "position"])
def test_draws_with_neighbouring_keys_are_independent(varied: str) -> None:
    draws = [OneDraw(**{varied: number}) for number in range(NUM_DRAWS)]
    drawn = run(LOGITS, *draws).token_ids
    size = len(LOGITS)
    pairs = torch.bincount(drawn[:-1] * size + drawn[1:], minlength=size * size)
    assert chi_square_p(pairs, torch.outer(PROBABILITIES, PROBABILITIES).flatten()) > 1e-4


def test_a_rare_token_is_as_rare_as_it_should_be() -> None:
    """One in 1,000 over 200,000 draws: the tail of the noise is right."""
    logits = torch.tensor([[0.999, 0.001]]).log()
    drawn = torch.cat(
        [
            run(logits, *[OneDraw(seed=seed, position=position) for position in range(NUM_DRAWS)]).token_ids
            for seed in range(10)
        ]
    )
    assert 150 < int(drawn.sum()) < 250  # 200, and a standard deviation of 14


def test_the_chi_square_test_sees_a_wrong_distribution() -> None:
    counts = counts_of("position")
    assert chi_square_p(counts, torch.tensor([0.05, 0.38, 0.17, 0.1, 0.3])) < 1e-6

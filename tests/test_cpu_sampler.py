"""The fast sampler: all that is said of the plain one holds for it, and both draw the same tokens."""

from __future__ import annotations

import pytest
import sampler_helpers
import torch
from sampler_helpers import OneDraw, make_batch
from test_sampler import *  # noqa: F403
from test_sampler_distribution import *  # noqa: F403
from test_sampler_independence import DRAWS, LOGITS
from test_sampler_oracle import *  # noqa: F403

from mini_vllm.kernels.cpu.build import load_kernels
from mini_vllm.model.cpu_sampler import CPU_STEPS
from mini_vllm.model.sampler import prompt_logprobs, sample
from mini_vllm.store.model_store import home

# These put noise of their own into the plain sampler, or count what it computes.
del test_a_nucleus_of_more_than_the_first_candidates_is_found, test_draws_that_want_no_logprobs_cost_none  # noqa: F821
del test_noise_is_made_for_random_draws_alone, test_temperature_comes_before_truncation  # noqa: F821
del test_the_same_tokens_survive, test_top_p_counts_what_min_p_left, test_top_p_counts_what_top_k_left  # noqa: F821
del test_top_p_of_a_neighbour_drops_no_token_of_a_draw_without_it, test_what_survives  # noqa: F821


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of the modules above, with the kernels."""
    load_kernels(home())
    monkeypatch.setattr(sampler_helpers, "STEPS", CPU_STEPS)


def test_both_draw_the_same_tokens_with_the_same_logprobs() -> None:
    batch = make_batch(DRAWS, LOGITS.shape[1])
    plain, fast = sample(LOGITS, batch), sample(LOGITS, batch, CPU_STEPS)
    assert fast.has_no_token.tolist() == plain.has_no_token.tolist()
    assert fast.token_ids[~plain.has_no_token].tolist() == plain.token_ids[~plain.has_no_token].tolist()
    torch.testing.assert_close(fast.logprobs, plain.logprobs, atol=1e-5, rtol=0, equal_nan=True)
    torch.testing.assert_close(fast.top_logprobs, plain.top_logprobs, atol=1e-5, rtol=0, equal_nan=True)
    for index, one in enumerate(DRAWS):
        best = slice(0, max(one.num_logprobs, 0))
        assert fast.top_token_ids[index, best].tolist() == plain.top_token_ids[index, best].tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(
    "cut",
    [
        *({}, {"top_k": 50}, {"top_k": 3000}, {"top_k": 3000, "top_p": 0.9}, {"min_p": 0.02}),
        *({"top_p": 0.2}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_p": 0.5, "min_p": 0.001}),
    ],
)
def test_over_a_whole_vocabulary_both_draw_the_same_tokens(temperature: float, cut: dict[str, float]) -> None:
    logits = torch.randn(2, 49_153, generator=torch.Generator().manual_seed(3)) * 3
    draws = [OneDraw(row=i % 2, temperature=temperature, seed=i, position=7 * i, **cut) for i in range(60)]
    batch = make_batch(draws, logits.shape[1])
    assert sample(logits, batch, CPU_STEPS).token_ids.tolist() == sample(logits, batch).token_ids.tolist()


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9])
def test_a_nucleus_that_ends_among_equal_tokens_ends_at_the_same_one(top_p: float) -> None:
    """Tokens of few different logits: of those at the end of the nucleus, the smaller ids are in it."""
    logits = torch.randint(0, 5, (2, 3001), generator=torch.Generator().manual_seed(5)).float()
    draws = [OneDraw(row=i % 2, temperature=1.0, top_p=top_p, seed=i) for i in range(400)]
    batch = make_batch(draws, logits.shape[1])
    assert sample(logits, batch, CPU_STEPS).token_ids.tolist() == sample(logits, batch).token_ids.tolist()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_fail_alone(broken: float) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    logits[1, 77] = broken
    draws = [OneDraw(row=row, temperature=1.0, top_p=0.9, num_logprobs=3) for row in range(3)]
    output = sample(logits, make_batch(draws, 500), CPU_STEPS)
    assert output.is_broken.tolist() == [False, True, False]
    assert output.logprobs.isnan().tolist() == [False, True, False]
    assert prompt_logprobs(logits, torch.tensor([1, 1, 1]), 2, CPU_STEPS).logprobs.isnan().tolist() == [
        False,
        True,
        False,
    ]

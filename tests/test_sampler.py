"""The sampler on scripted logits: every parameter, the order in which they work, ties, and rows that fail."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import sampler_helpers
import torch
from sampler_helpers import OneDraw, make_batch, run, survivors, tokens, worked_draws
from torch import Tensor

from mini_vllm.model import sampler, sampling_draw, sampling_pieces
from mini_vllm.model.sampler import prompt_logprobs, sample
from mini_vllm.model.sampling_adjustments import adjust, apply_bitmask, best_allowed, unpack_bitmask
from mini_vllm.model.sampling_batch import group_draws
from mini_vllm.model.sampling_order import top_tokens

INF, NAN = math.inf, math.nan
GREEDY = OneDraw(temperature=0)


def probabilities(*values: float) -> Tensor:
    """Logits that give these probabilities."""
    return torch.tensor(values).log()


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 4.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# ---- greedy --------------------------------------------------------------------------------------------------------


def test_temperature_0_takes_the_greatest_logit_and_the_smaller_id_of_two() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 2.0, 5.0], [-INF, -INF, -9.0]])
    assert tokens(logits, *[OneDraw(row=row, temperature=0) for row in (2, 0, 1, 1)]) == [2, 1, 0, 0]


def test_a_greedy_batch_costs_an_argmax_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adjust", "draw_tokens", "prompt_logprobs"):
        monkeypatch.setattr(sampler, name, None)
    assert tokens([1.0, 2.0], GREEDY, GREEDY) == [1, 1]


def test_noise_is_made_for_random_draws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def recorded(seeds: Tensor, sample_index: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        made.append((len(seeds), token_ids.shape[1]))
        return torch.zeros(len(seeds), token_ids.shape[1])

    monkeypatch.setattr(sampling_draw, "gumbel_noise", recorded)
    penalised = OneDraw(temperature=0, presence_penalty=1.0, output=[1])
    tokens(random_logits(1, 100), GREEDY, penalised, OneDraw(top_k=5), OneDraw(top_k=2), OneDraw())
    assert made == [(2, 5), (1, 100)]  # the two with top_k among 5 candidates, the free one among all


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 1.5, "top_p": 1e-9},
        {"temperature": 1.5, "top_p": 1e-300},
        {"temperature": 1.5, "min_p": 1.0},
        {"temperature": 1e-5},
        {"temperature": 1e-5, "top_k": 40, "top_p": 0.9, "min_p": 1e-9},
        {"temperature": 1e6, "top_k": 7, "top_p": 1e-9},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extreme_values_equal_greedy(fields: dict[str, Any], dtype: torch.dtype) -> None:
    """F44."""
    logits = random_logits(60, 1000).to(dtype).float()
    gaps = torch.diff(logits.topk(2).values).abs()
    logits = logits[gaps.squeeze(1) > 1e-3]  # with a closer second, a temperature of 1e-5 leaves it a chance
    assert len(logits) > 50
    draws = [OneDraw(row=row, seed=row, **fields) for row in range(len(logits))]
    assert tokens(logits, *draws) == logits.argmax(dim=1).tolist()


def test_the_highest_temperature_gives_every_token_a_chance() -> None:
    drawn = tokens([-30.0, 0.0, 30.0, 5.0], *[OneDraw(temperature=1e6, position=p) for p in range(200)])
    assert set(drawn) == {0, 1, 2, 3}


# ---- truncation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "fields", "kept"),
    [
        ((0.1, 0.2, 0.3, 0.4), {}, {0, 1, 2, 3}),
        ((0.1, 0.2, 0.3, 0.4), {"top_p": 0.6}, {2, 3}),  # F47: the token that crosses p is kept
        ((0.1, 0.2, 0.3, 0.4), {"top_p": 0.35}, {3}),
        ((0.1, 0.2, 0.3, 0.4), {"top_p": 0.75}, {1, 2, 3}),
        ((0.1, 0.2, 0.3, 0.4), {"top_p": 1.0}, {0, 1, 2, 3}),
        ((0.1, 0.2, 0.3, 0.4), {"top_p": 1e-9}, {3}),
        ((0.1, 0.2, 0.3, 0.4), {"top_k": 3}, {1, 2, 3}),
        ((0.1, 0.2, 0.3, 0.4), {"top_k": 4}, {0, 1, 2, 3}),
        ((0.1, 0.2, 0.3, 0.4), {"top_k": 10**6}, {0, 1, 2, 3}),
        ((0.1, 0.2, 0.3, 0.4), {"top_k": 2**63 - 1}, {0, 1, 2, 3}),
        ((0.1, 0.2, 0.3, 0.4), {"min_p": 0.45}, {1, 2, 3}),  # the threshold is .45 x .4 = .18
        ((0.1, 0.2, 0.3, 0.4), {"min_p": 1.0}, {3}),
        # among equal ones, the smaller ids
        ((0.25, 0.25, 0.25, 0.25), {"top_k": 2}, {0, 1}),
        ((0.25, 0.25, 0.25, 0.25), {"top_p": 0.5}, {0, 1}),
        ((0.2, 0.4, 0.2, 0.2), {"top_k": 3}, {0, 1, 2}),
        ((0.25, 0.25, 0.25, 0.25), {"min_p": 1.0}, {0, 1, 2, 3}),
        # excluded tokens never come back
        ((0.0, 0.5, 0.0, 0.5), {"top_k": 3}, {1, 3}),
        ((0.0, 0.5, 0.0, 0.5), {"top_p": 0.999}, {1, 3}),
        ((0.0, 0.5, 0.0, 0.5), {"min_p": 1e-9}, {1, 3}),
        ((0.0, 0.5, 0.0, 0.5), {}, {1, 3}),
    ],
)
def test_what_survives(
    values: tuple[float, ...], fields: dict[str, Any], kept: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert survivors(probabilities(*values), monkeypatch, **fields) == kept
    assert set(tokens(probabilities(*values), *[OneDraw(position=p, **fields) for p in range(500)])) == kept


def test_top_p_counts_what_top_k_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of .4 .3 .2 .1, top_k 3 leaves .444 .333 .222: before the third stand .777. Without it .7: it stays."""
    logits = probabilities(0.4, 0.3, 0.2, 0.1)
    assert survivors(logits, monkeypatch, top_k=3, top_p=0.75) == {0, 1}
    assert survivors(logits, monkeypatch, top_p=0.75) == {0, 1, 2}


def test_top_p_counts_what_min_p_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of .5 .2 .2 .1, min_p .3 leaves .556 .222 .222: before the third stand .778. Without it .7."""
    logits = probabilities(0.5, 0.2, 0.2, 0.1)
    assert survivors(logits, monkeypatch, min_p=0.3, top_p=0.75) == {0, 1}
    assert survivors(logits, monkeypatch, top_p=0.75) == {0, 1, 2}


def test_temperature_comes_before_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperature .5 makes .533 .3 .133 .033 of .4 .3 .2 .1; temperature 2 makes .325 .282 .230 .163."""
    logits = probabilities(0.4, 0.3, 0.2, 0.1)
    assert survivors(logits, monkeypatch, temperature=0.5, top_p=0.5) == {0}
    assert survivors(logits, monkeypatch, top_p=0.5) == {0, 1}
    assert survivors(logits, monkeypatch, temperature=0.5, min_p=0.4) == {0, 1}
    assert survivors(logits, monkeypatch, temperature=2.0, min_p=0.4) == {0, 1, 2, 3}


def test_top_p_of_a_neighbour_drops_no_token_of_a_draw_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 1 has so little mass (e^-50) that adding it changes no sum; only a top_p below 1 may drop it."""
    monkeypatch.setattr(
        sampling_draw, "gumbel_noise", lambda seeds, samples, positions, token_ids: (token_ids == 1).float() * 1e9
    )
    assert tokens([0.0, -50.0, -60.0], OneDraw(top_k=2), OneDraw(top_k=2, top_p=0.999)) == [1, 0]


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("top_p", [0.31, 0.9, 0.9999999])
def test_a_nucleus_of_more_than_the_first_candidates_is_found(
    scale: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(1, 1500, scale=scale)[0]
    ordered = logits.double().sort(descending=True, stable=True)
    mass = ordered.values.softmax(0).cumsum(0)
    count = int((mass < top_p).sum()) + 1
    if scale < 1:
        assert count > sampling_draw.NUCLEUS_CANDIDATES or top_p == 0.31
    found = survivors(logits, monkeypatch, top_p=top_p)
    if top_p < 0.99:
        assert found == set(ordered.indices[:count].tolist())
    else:  # float32 probabilities have no exact place for it
        assert len(found) >= 1490


def test_draws_are_grouped_by_how_they_are_cut_down() -> None:
    groups = group_draws(
        temperature=np.array([1, 0, 1, 1, 1, 1], np.float32),
        top_k=np.array([0, 5, 3, 9, 10, 2], np.int64),
        top_p=np.array([1, 0.5, 1, 0.5, 0.5, 1], np.float32),
        min_p=np.array([0.1, 0, 0, 0, 0, 0], np.float32),
        vocab_size=10,
        device=torch.device("cpu"),
    )
    found = [(group.places.tolist(), group.max_top_k, group.uses_top_p, group.uses_min_p) for group in groups]
    assert found == [([2, 3, 5], 9, True, False), ([4], 0, True, False), ([0], 0, False, True)]


# ---- masks, bias, penalties ----------------------------------------------------------------------------------------


def adjusted(logits: list[float], **fields: Any) -> list[float]:
    result: list[float] = adjust(torch.tensor([logits]), worked_draws([OneDraw(**fields)], len(logits)))[0].tolist()
    return result


LOGITS = [2.0, -1.0, 0.5, 4.0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"allowed": [1, 2]}, [-INF, -1.0, 0.5, -INF]),
        ({"grammar": [0, 3]}, [2.0, -INF, -INF, 4.0]),
        ({"allowed": [1, 2], "grammar": [0, 2]}, [-INF, -INF, 0.5, -INF]),
        ({"forbidden": [3, 0]}, [-INF, -1.0, 0.5, -INF]),
        ({"bias": {1: 5.0, 3: -100.0}}, [2.0, 4.0, 0.5, -96.0]),
        ({"repetition_penalty": 2.0, "prompt": [0, 1]}, [1.0, -2.0, 0.5, 4.0]),
        ({"repetition_penalty": 2.0, "output": [0, 1, 1]}, [1.0, -2.0, 0.5, 4.0]),
        ({"repetition_penalty": 0.5, "prompt": [0], "output": [1]}, [4.0, -0.5, 0.5, 4.0]),
        ({"presence_penalty": 1.5, "prompt": [3], "output": [1, 1, 1]}, [2.0, -2.5, 0.5, 4.0]),
        ({"frequency_penalty": 0.5, "prompt": [3], "output": [1, 2, 1, 1]}, [2.0, -2.5, 0.0, 4.0]),
        ({"frequency_penalty": -0.5, "presence_penalty": 1.0, "output": [0, 0]}, [2.0, -1.0, 0.5, 4.0]),
        ({"repetition_penalty": 3.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}, LOGITS),
    ],
)
def test_adjusted_logits_are_exact(fields: dict[str, Any], expected: list[float]) -> None:
    assert adjusted(LOGITS, **fields) == expected


def test_a_mask_comes_before_the_bias_and_wins() -> None:
    for mask in ({"forbidden": [1]}, {"allowed": [0, 2, 3]}, {"grammar": [0, 2, 3]}):
        assert adjusted(LOGITS, bias={1: 100.0}, **mask)[1] == -INF


def test_bias_comes_before_penalties() -> None:
    """(1 + 3) / 2, not 1 / 2 + 3."""
    assert adjusted([1.0, 0.0], bias={0: 3.0}, repetition_penalty=2.0, prompt=[0]) == [2.0, 0.0]


def test_repetition_comes_before_presence_and_frequency() -> None:
    """2 / 2 - 1 - 0.5, not (2 - 1 - 0.5) / 2."""
    found = adjusted([2.0], repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5, output=[0])
    assert found == [-0.5]


def test_penalties_see_prompt_and_output_as_they_are_split() -> None:
    """F49: the same tokens, but output that was taken for prompt would lose its presence penalty."""
    fields = {"presence_penalty": 1.0, "repetition_penalty": 2.0}
    assert adjusted([2.0, 2.0], prompt=[0], output=[1], **fields) == [1.0, 0.0]
    assert adjusted([2.0, 2.0], prompt=[0, 1], output=[], **fields) == [1.0, 1.0]


def test_adjustments_stay_with_their_draw() -> None:
    """Neighbours that read the same row are not touched, and neither is the row."""
    logits = torch.tensor([LOGITS])
    draws = [
        GREEDY,
        OneDraw(temperature=0, bias={1: 100.0}),
        OneDraw(temperature=0, forbidden=[3]),
        OneDraw(temperature=0, allowed=[2]),
        OneDraw(temperature=0, grammar=[1, 2]),
        OneDraw(temperature=0, frequency_penalty=2.0, output=[3, 3]),
        OneDraw(top_k=1),
    ]
    assert tokens(logits, *draws) == [3, 1, 0, 2, 2, 0, 3]
    assert logits.tolist() == [LOGITS]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_bitmasks_are_read_from_the_lowest_bit(vocab_size: int) -> None:
    allowed = [token for token in range(vocab_size) if token % 31 == 0]
    mask = worked_draws([OneDraw(grammar=allowed)], vocab_size).grammar_mask
    assert mask is not None
    assert mask.dtype == torch.int32
    assert unpack_bitmask(mask, vocab_size)[0].nonzero().flatten().tolist() == allowed


# ---- rows that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [[NAN, 1.0, 2.0], [1.0, INF, 2.0], [-INF, NAN, 3.0], [NAN] * 3, [-INF] * 3], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"temperature": 0, "forbidden": [1]},
        {"allowed": [2]},
        {"repetition_penalty": 2.0, "prompt": [0]},
    ],
    ids=str,
)
def test_a_broken_row_fails_its_own_draws_and_no_others(broken: list[float], fields: dict[str, Any]) -> None:
    """F98. Also where a mask would hide the broken logit."""
    logits = torch.tensor([[1.0, 0.0, 2.0], broken, [0.5, 0.1, 0.3]])
    draws = [OneDraw(row=row, seed=row, num_logprobs=2, **fields) for row in (0, 1, 2, 1)]
    output = run(logits, *draws)
    assert output.is_broken.tolist() == [False, True, False, True]
    assert output.has_no_token.tolist() == [False] * 4
    for index in (0, 2):
        alone = run(logits, draws[index])
        assert alone.token_ids[0] == output.token_ids[index]
        assert alone.logprobs is not None
        assert output.logprobs is not None
        assert alone.logprobs[0] == output.logprobs[index]
    assert ((output.token_ids >= 0) & (output.token_ids < 3)).all()


def test_masks_that_leave_no_token_are_told_from_broken_rows() -> None:
    empty = {"allowed": [1], "forbidden": [1]}
    draws = [
        GREEDY,
        OneDraw(temperature=0, **empty),
        OneDraw(**empty),
        OneDraw(top_p=0.5, **empty),
        OneDraw(top_k=2, grammar=[]),
        OneDraw(row=1, **empty),
    ]
    output = run(torch.tensor([[1.0, 2.0, 3.0], [NAN, 0.0, 0.0]]), *draws)
    assert output.has_no_token.tolist() == [False, True, True, True, True, False]
    assert output.is_broken.tolist() == [False] * 5 + [True]
    assert output.token_ids[0] == 2


def test_tokens_that_the_model_excludes_are_no_fault() -> None:
    output = run([-INF, 1.0, -INF], OneDraw(), OneDraw(top_k=3), OneDraw(top_p=0.9), GREEDY)
    assert output.token_ids.tolist() == [1, 1, 1, 1]
    assert not output.is_broken.any()


# ---- logprobs ------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_whatever_the_parameters() -> None:
    logits = random_logits(1, 50)
    raw = logits[0].double().log_softmax(0)
    draws = [
        OneDraw(temperature=0, num_logprobs=0),
        OneDraw(temperature=3.0, seed=5, num_logprobs=5),
        OneDraw(temperature=0, bias={7: 100.0}, num_logprobs=5),
        OneDraw(temperature=0, presence_penalty=2.0, output=[1, 2], num_logprobs=5),
        OneDraw(top_k=1, num_logprobs=5),
    ]
    output = run(logits, *draws)
    assert output.logprobs is not None
    assert output.top_token_ids is not None
    assert output.top_logprobs is not None
    torch.testing.assert_close(output.logprobs.double(), raw[output.token_ids], rtol=0, atol=1e-5)
    best = raw.topk(5)
    for index in range(len(draws)):
        assert output.top_token_ids[index].tolist() == best.indices.tolist()
        torch.testing.assert_close(output.top_logprobs[index].double(), best.values, rtol=0, atol=1e-5)
    assert output.token_ids[2] == 7


def test_a_sampled_token_outside_the_alternatives_has_its_logprob() -> None:
    """F34."""
    output = run(probabilities(0.98, 0.01, 0.01), OneDraw(temperature=0, bias={2: 50.0}, num_logprobs=1))
    assert output.logprobs is not None
    assert output.top_token_ids is not None
    assert output.token_ids.tolist() == [2]
    assert output.top_token_ids.tolist() == [[0]]
    assert math.isclose(output.logprobs.item(), math.log(0.01), rel_tol=1e-5)


def test_draws_that_want_no_logprobs_cost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def recorded(logits: Tensor, drawn_from: Tensor, targets: Tensor, num_logprobs: int) -> sampler.LogprobsOutput:
        rows.append(len(drawn_from))
        return sampler.logprobs_of_rows(logits, drawn_from, targets, num_logprobs)

    steps = dataclasses.replace(sampler.PLAIN_STEPS, logprobs=recorded)
    monkeypatch.setattr(sampler_helpers, "STEPS", steps)
    none = run(LOGITS, GREEDY, GREEDY)
    some = run(LOGITS, GREEDY, OneDraw(temperature=0, num_logprobs=2), GREEDY)
    assert rows == [1]
    assert (none.logprobs, none.top_token_ids, none.top_logprobs) == (None, None, None)
    assert some.logprobs is not None
    assert some.logprobs.isnan().tolist() == [True, False, True]
    assert some.top_token_ids is not None
    assert some.top_token_ids[1].tolist() == [3, 0]


def test_excluded_tokens_have_a_logprob_of_minus_infinity() -> None:
    output = run([-INF, 0.0, 0.0], OneDraw(temperature=0, num_logprobs=3))
    assert output.top_logprobs is not None
    assert output.top_logprobs[0].tolist() == pytest.approx([-math.log(2), -math.log(2), -INF])


def test_more_alternatives_than_tokens_gives_all_tokens() -> None:
    output = run([0.0, 2.0, 1.0], OneDraw(temperature=0, num_logprobs=20))
    assert output.top_token_ids is not None
    assert output.top_token_ids.tolist() == [[1, 2, 0]]


def test_equal_alternatives_stand_in_the_order_of_their_ids() -> None:
    output = run(torch.arange(3.0).repeat(100), OneDraw(temperature=0, num_logprobs=20))
    assert output.top_token_ids is not None
    assert output.top_token_ids.tolist() == [list(range(2, 62, 3))]


@pytest.mark.parametrize("piece", [1, 150, 10**6])
def test_prompt_logprobs_equal_log_softmax_in_pieces_of_any_size(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_pieces, "ELEMENTS_ON_CPU", piece)
    logits, targets = random_logits(7, 50), torch.arange(7) * 3
    found = prompt_logprobs(logits, targets, 4)
    expected = logits.double().log_softmax(1)
    torch.testing.assert_close(found.logprobs.double(), expected[torch.arange(7), targets], rtol=0, atol=1e-5)
    assert torch.equal(found.top_token_ids, expected.topk(4).indices)
    torch.testing.assert_close(found.top_logprobs.double(), expected.topk(4).values, rtol=0, atol=1e-5)


def test_prompt_logprobs_without_alternatives_or_rows() -> None:
    found = prompt_logprobs(random_logits(3, 50), torch.zeros(3, dtype=torch.int64), 0)
    assert (found.logprobs.shape, found.top_token_ids.shape, found.top_logprobs.shape) == ((3,), (3, 0), (3, 0))
    assert prompt_logprobs(random_logits(0, 50), torch.zeros(0, dtype=torch.int64), 2).top_token_ids.shape == (0, 2)


def test_a_broken_prompt_row_gives_nan_and_leaves_the_others() -> None:
    logits = random_logits(3, 10)
    logits[1, 4] = NAN
    assert prompt_logprobs(logits, torch.tensor([1, 2, 3]), 1).logprobs.isnan().tolist() == [False, True, False]


# ---- the order of tokens -------------------------------------------------------------------------------------------


def test_top_tokens_are_in_one_order_for_every_k() -> None:
    """Few different values, so that nearly all of them tie; both zeros are equal; -inf comes last."""
    logits = torch.randint(-3, 3, (20, 300), generator=torch.Generator().manual_seed(1)).float()
    logits[logits == -3] = -INF
    logits = logits.where((logits != 0) | (torch.arange(300) % 7 > 0), -0.0)
    expected = logits.sort(dim=1, descending=True, stable=True)
    for k in (0, 1, 2, 50, 299, 300):
        values, token_ids = top_tokens(logits, k)
        assert torch.equal(token_ids, expected.indices[:, :k])
        assert torch.equal(values, expected.values[:, :k])


def test_top_tokens_of_finely_different_logits() -> None:
    """Neighbouring float32 numbers of all sizes and both signs."""
    base = torch.tensor([0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1.0, -1.0, 3.4e38, -3.4e38])
    logits = torch.cat([base, base.nextafter(torch.tensor(INF)), base.nextafter(torch.tensor(-INF))])[None]
    expected = logits.sort(dim=1, descending=True, stable=True)
    assert torch.equal(top_tokens(logits, logits.shape[1])[1], expected.indices)


def test_pieces_do_not_change_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(30, 100)
    batch = make_batch([OneDraw(row=row, seed=row, top_k=row % 3, top_p=0.8) for row in range(30)], 100)
    whole = sample(logits, batch).token_ids
    monkeypatch.setattr(sampling_pieces, "ELEMENTS_ON_CPU", 1)
    assert torch.equal(sample(logits, batch).token_ids, whole)


@pytest.mark.parametrize("vocab_size", [32, 70, 259])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_a_bitmask_leaves_exactly_the_tokens_whose_bits_are_set(vocab_size: int, share: float) -> None:
    generator = np.random.default_rng(0)
    is_allowed = generator.random((4, vocab_size)) < share
    padded = np.zeros((4, -(-vocab_size // 32) * 32), np.uint8)
    padded[:, :vocab_size] = is_allowed
    mask = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    logits = torch.randn(4, vocab_size)
    assert torch.equal(unpack_bitmask(mask, vocab_size), torch.from_numpy(is_allowed))
    expected = torch.where(torch.from_numpy(is_allowed), logits, -torch.inf)
    apply_bitmask(logits, mask)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_greedy_draws_under_a_mask_alone_are_the_maximum_of_the_masked_row(share: float) -> None:
    generator = np.random.default_rng(1)
    is_allowed = generator.random((6, 320)) < share
    mask = torch.from_numpy(np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32))
    logits = torch.randn(4, 320, generator=torch.Generator().manual_seed(0))
    logits[1, :] = -torch.inf
    logits[2, 7] = logits[2, 9] = 50.0  # a tie
    rows = torch.tensor([0, 1, 2, 2, 3, 0])
    before = logits.clone()
    token_ids, has_no_token = best_allowed(logits, rows, logits.argmax(dim=1)[rows], mask)
    masked = logits[rows].masked_fill(~torch.from_numpy(is_allowed), -torch.inf)
    values, expected = masked.max(dim=1)
    assert torch.equal(has_no_token, values == -torch.inf)
    assert torch.equal(token_ids[~has_no_token], expected[~has_no_token])
    assert torch.equal(logits, before)

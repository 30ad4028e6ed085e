"""A draw gets the same token and logprobs alone, in any batch and in any order: to the bit.

The logits are rounded as bfloat16 rounds them, so that each row is full of ties.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from sampler_helpers import OneDraw, run

VOCAB_SIZE = 1200
NUM_ROWS = 12
# From peaked to flat, so that a nucleus may have one token or nearly all of them.
SCALES = torch.tensor([0.02, 0.5, 1.0, 3.0]).repeat(NUM_ROWS // 4)[:, None]
LOGITS = (torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * SCALES).bfloat16().float()


def random_draw(rng: random.Random) -> OneDraw:
    def maybe(value: object, otherwise: object) -> object:
        return value if rng.random() < 0.4 else otherwise

    history = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    fields = {
        "row": rng.randrange(NUM_ROWS),
        "temperature": rng.choice([0, 0.3, 1.0, 1.0, 2.0]),
        "top_k": maybe(rng.choice([1, 2, 7, 50, 600, 5000]), 0),
        "top_p": maybe(rng.choice([0.1, 0.5, 0.9, 0.99]), 1.0),
        "min_p": maybe(rng.choice([0.01, 0.3]), 0.0),
        "repetition_penalty": maybe(1.3, 1.0),
        "presence_penalty": maybe(-0.7, 0.0),
        "frequency_penalty": maybe(0.4, 0.0),
        "seed": rng.randrange(-(2**63), 2**63),
        "sample_index": rng.randrange(4),
        "position": rng.randrange(5000),
        "num_logprobs": rng.choice([-1, -1, 0, 1, 5, 20]),
        "prompt": history[:10],
        "output": history[10 : rng.randrange(10, 30)],
        "allowed": maybe(rng.sample(range(VOCAB_SIZE), 300), ()),
        "forbidden": maybe(rng.sample(range(VOCAB_SIZE), 5), ()),
        "bias": maybe({rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9)}, {}),
        "grammar": maybe(rng.sample(range(VOCAB_SIZE), 900), None),
    }
    return OneDraw(**fields)  # type: ignore[arg-type]


RNG = random.Random(17)
DRAWS = [random_draw(RNG) for _ in range(150)]


def results(draws: list[OneDraw]) -> list[tuple[object, ...]]:
    """(token, failed, logprob, alternatives and their logprobs) of each draw; the latter three only as asked for."""
    output = run(LOGITS, *draws)
    found: list[tuple[object, ...]] = []
    for index, one in enumerate(draws):
        entry: tuple[object, ...] = (int(output.token_ids[index]), bool(output.has_no_token[index]))
        if one.num_logprobs >= 0:
            assert output.logprobs is not None
            assert output.top_token_ids is not None
            assert output.top_logprobs is not None
            best = slice(0, one.num_logprobs)
            entry += (
                float(output.logprobs[index]),
                output.top_token_ids[index, best].tolist(),
                output.top_logprobs[index, best].tolist(),
            )
        found.append(entry)
    return found


ALONE = [results([one])[0] for one in DRAWS]


def test_the_cases_are_worth_something() -> None:
    """Rows have ties at every place, and the draws meet every group."""
    assert all(len(row.unique()) < VOCAB_SIZE - 300 for row in LOGITS)
    assert sum(one.temperature > 0 and 0 < one.top_k < VOCAB_SIZE for one in DRAWS) > 20
    assert sum(one.temperature > 0 and one.top_k == 0 and one.top_p < 1 for one in DRAWS) > 20
    assert sum(one.temperature > 0 and one.top_k == 0 and one.top_p == 1 for one in DRAWS) > 20
    assert len({entry[0] for entry in ALONE}) > 100


def test_all_together() -> None:
    assert results(DRAWS) == ALONE


@pytest.mark.parametrize("seed", range(4))
def test_in_any_order_and_any_company(seed: int) -> None:
    order = list(range(len(DRAWS)))
    rng = random.Random(seed)
    rng.shuffle(order)
    while order:
        members, order = order[: rng.randrange(1, 40)], order[40:]
        assert results([DRAWS[i] for i in members]) == [ALONE[i] for i in members]


def test_beside_unseeded_and_greedy_neighbours() -> None:
    """F41."""
    one = OneDraw(row=1, seed=7, position=4)
    neighbours = [OneDraw(row=row, temperature=0) for row in range(4)] + [OneDraw(row=1, seed=s) for s in range(99)]
    assert {tuple(results([*neighbours[:count], one])[-1]) for count in (0, 3, 50, 103)} == {tuple(results([one])[0])}


@pytest.mark.parametrize("fields", [{"top_k": 7}, {"top_p": 0.5}, {}, {"top_k": 300, "top_p": 0.9}], ids=str)
def test_a_neighbour_with_a_larger_k_changes_nothing(fields: dict[str, float]) -> None:
    draws = [OneDraw(row=row, seed=row, position=p, **fields) for row in range(NUM_ROWS) for p in range(10)]
    alone = results(draws)
    greedier = [replace(one, top_k=VOCAB_SIZE - 1, top_p=1.0, num_logprobs=20) for one in draws]
    assert [entry[0] for entry in results(draws + greedier)[: len(draws)]] == [entry[0] for entry in alone]


def test_siblings_of_one_row_get_different_tokens_and_the_same_ones_again() -> None:
    """F29."""
    siblings = [OneDraw(row=0, seed=7, sample_index=index) for index in range(4)]
    drawn = [entry[0] for entry in results(siblings)]
    assert len(set(drawn)) == 4
    assert [entry[0] for entry in results(siblings)] == drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_row_at_another_place_gives_the_same(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 777, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    draws = [OneDraw(row=row, seed=3, position=8, num_logprobs=3) for row in range(33)]
    output = run(logits.expand(33, -1), *draws)
    assert output.logprobs is not None
    assert len(output.token_ids.unique()) == 1
    assert len(output.logprobs.unique()) == 1

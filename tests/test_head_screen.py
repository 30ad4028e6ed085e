"""The greatest logit found through bytes: the bits of computing all logits, whatever the weights look like."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mini_vllm.kernels.cpu import build, ops
from mini_vllm.model.head_screen import Rotation, make_screen
from mini_vllm.store.model_store import home

DTYPES = [torch.float32, torch.bfloat16]
OUTPUTS = 32 * 40 + 7  # panels of 32, the last one not full
Maker = Callable[[torch.Generator, int], tuple[Tensor, Tensor]]  # inputs -> weight [outputs, inputs], x [rows, inputs]


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    build.load_kernels(home())


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def outliers(generator: torch.Generator, inputs: int) -> tuple[Tensor, Tensor]:
    """A few inputs are far larger than the others, in the weight and in the rows, as in language models."""
    factors = torch.ones(inputs)
    factors[:: max(inputs // 3, 1)] = 60
    return normal(generator, OUTPUTS, inputs) * factors.sqrt(), normal(generator, 9, inputs) * factors


def lengths(generator: torch.Generator, inputs: int) -> tuple[Tensor, Tensor]:
    """Rows of the weight from very short to very long."""
    scales = torch.logspace(-6, 3, OUTPUTS)[torch.randperm(OUTPUTS, generator=generator), None]
    return normal(generator, OUTPUTS, inputs) * scales, normal(generator, 9, inputs)


def near_ties(generator: torch.Generator, inputs: int) -> tuple[Tensor, Tensor]:
    """Five places all over the weight say almost the same, and the rest says little."""
    weight = normal(generator, OUTPUTS, inputs) * 0.02
    x = normal(generator, 9, inputs)
    places = torch.randperm(OUTPUTS, generator=generator)[:5]
    weight[places] = x[0] * (1 + normal(generator, 5, 1) * 1e-3)
    return weight, x[:1].expand(9, -1) * (1 + normal(generator, 9, 1) * 1e-2)


def all_negative(generator: torch.Generator, inputs: int) -> tuple[Tensor, Tensor]:
    """No logit is above 0, which is what the outputs have that fill up the last panel."""
    scales = torch.logspace(-1, 1, OUTPUTS)[torch.randperm(OUTPUTS, generator=generator), None]
    return (-normal(generator, OUTPUTS, inputs).abs() - 0.1) * scales, normal(generator, 9, inputs).abs() + 0.1


def tiny(generator: torch.Generator, inputs: int) -> tuple[Tensor, Tensor]:
    """Products of which some are too small for a float."""
    return normal(generator, OUTPUTS, inputs) * 1e-30, normal(generator, 9, inputs) * 1e-13


def huge(generator: torch.Generator, inputs: int) -> tuple[Tensor, Tensor]:
    return normal(generator, OUTPUTS, inputs) * 1e14, normal(generator, 9, inputs) * 1e14


MAKERS: list[Maker] = [outliers, lengths, near_ties, all_negative, tiny, huge]


def found_and_whole(weight: Tensor, x: Tensor) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor]]:
    """What the screen says, and the maximum of all logits."""
    screen = make_screen(weight)
    assert screen is not None
    packed = ops.pack_linear(weight)
    whole = ops.linear(x, packed, len(weight), float32_output=True).max(dim=1)
    return screen.best_outputs(x, packed), (whole.values, whole.indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [4, 36, 44, 64, 576])  # 44 = 4 x 11
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_best_outputs_have_the_bits_of_all_logits(make: Maker, inputs: int, dtype: torch.dtype) -> None:
    num_found = 0
    for seed in range(8):
        weight, x = make(torch.Generator().manual_seed(seed), inputs)
        found, (values, places) = found_and_whole(weight.to(dtype), x.to(dtype))
        if found is not None:
            num_found += 1
            assert torch.equal(found[0], values)
            assert torch.equal(found[1], places)
    # Nothing found is a right answer too, but not the usual one; four numbers say too little to tell many rows apart.
    assert num_found >= 6 or inputs == 4 or make is tiny


def turned_back(rotation: Rotation, rows: Tensor) -> Tensor:
    """Rows that become `rows` when they are turned."""
    matrices = rows.reshape(-1, len(rotation.left), len(rotation.right))
    return (rotation.left.T @ matrices @ rotation.right.T).flatten(start_dim=1)


@pytest.mark.parametrize("what_is_rounded", ["weight", "row"])
def test_the_bounds_hold_where_all_that_rounding_lost_adds_up(what_is_rounded: str) -> None:
    """In bytes the best output looks worse than another one: each number lost half a unit, all in one direction."""
    rotation, generator = Rotation(576), torch.Generator().manual_seed(0)
    best, other = (torch.randint(-100, 101, (576,), generator=generator).float() for _ in range(2))
    row = torch.randint(-100, 101, (576,), generator=generator).float()
    if what_is_rounded == "weight":
        other = best.clone()
        other[:40] += row[:40].sign()  # what the other one has more than the best one, in bytes
        best += 0.49 * row.sign()
    else:
        other = best.clone()
        row[:200] = 0
        other[:200] -= 3  # in bytes these count for nothing
        other[200:203] += row[200:203].sign()
        row[:200] = 0.49
    for codes in (best, other, row):
        codes[-1] = 127  # so that a unit is 1
    assert (best - other) @ row > 0
    assert (best.round() - other.round()) @ row.round() < 0
    weight = torch.zeros(OUTPUTS, 576)
    weight[[700, 300]] = torch.stack([best, other])
    found, (_, places) = found_and_whole(turned_back(rotation, weight), turned_back(rotation, row[None]))
    assert places.tolist() == [700]
    assert found is not None
    assert found[1].tolist() == [700]


@pytest.mark.parametrize("rows", [1, 2, 12, 13, 38, 128, 300])
def test_any_number_of_rows(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = normal(generator, OUTPUTS, 64).bfloat16(), normal(generator, rows, 64).bfloat16()
    found, (values, places) = found_and_whole(weight, x)
    assert found is not None
    assert torch.equal(found[0], values)
    assert torch.equal(found[1], places)


def test_few_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    for outputs in (1, 2, 31, 32, 33):
        found, (values, places) = found_and_whole(normal(generator, outputs, 16), normal(generator, 3, 16))
        assert found is not None
        assert torch.equal(found[0], values)
        assert torch.equal(found[1], places)


def test_among_equal_outputs_the_first_one_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = normal(generator, OUTPUTS, 64) * 0.01, normal(generator, 1, 64)
    weight[[777, 300, 1200]] = x
    found, _ = found_and_whole(weight, x)
    assert found is not None
    assert found[1].tolist() == [300]


def test_where_all_outputs_are_alike_nothing_is_found() -> None:
    weight = torch.ones(OUTPUTS, 64)
    found, _ = found_and_whole(weight, torch.ones(3, 64))
    assert found is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e20])
def test_a_row_without_bounds_is_left_to_the_sampler(value: float) -> None:
    x = torch.ones(3, 64)
    x[1, 5] = value
    found, _ = found_and_whole(normal(torch.Generator().manual_seed(0), OUTPUTS, 64), x)
    assert found is None


def test_rows_whose_products_may_be_lost_are_left_to_the_sampler() -> None:
    """Where products are too small for a float, or a dot product takes small numbers as 0, no bound would hold."""
    weight = normal(torch.Generator().manual_seed(0), OUTPUTS, 64)
    for scale in (0, 1e-38, 1e-25):
        found, _ = found_and_whole(weight.bfloat16(), (torch.ones(3, 64) * scale).bfloat16())
        assert found is None


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38, -1e20])
def test_a_weight_whose_products_may_overflow_has_no_screen(value: float) -> None:
    weight = torch.ones(OUTPUTS, 64)
    weight[70] = value
    assert make_screen(weight) is None


@pytest.mark.parametrize("width", [62, 65540])
def test_a_width_that_bytes_do_not_suit_has_no_screen(width: int) -> None:
    assert make_screen(torch.ones(2, width)) is None


def test_after_a_search_in_vain_there_is_a_pause_that_grows() -> None:
    weight, x = torch.ones(OUTPUTS, 64), torch.ones(1, 64)
    weight[500] = 9
    screen, packed = make_screen(weight), ops.pack_linear(weight)
    assert screen is not None
    for row, is_found in [(x * 1e20, False), (x, False), (x, True), (x * 1e20, False), (x, False), (x, True)]:
        assert (screen.best_outputs(row, packed) is not None) == is_found
    for row, is_found in [(x * 1e20, False), (x, False), (x * 1e20, False), *[(x, False)] * 3, (x, True)]:
        assert (screen.best_outputs(row, packed) is not None) == is_found


def test_a_rotation_moves_no_product_and_spreads_what_is_large() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (4, 7, 36, 44, 576):
        rotation = Rotation(width)
        one, other = normal(generator, 5, width), normal(generator, 6, width)
        torch.testing.assert_close(rotation(one) @ rotation(other).T, one @ other.T, rtol=1e-5, atol=1e-4)
    peak = torch.zeros(1, 576)
    peak[0, 100] = 1
    assert rotation(peak).abs().max() < 0.5  # of 576 even elements each is 0.04
